"""What the ranks beyond the first have in place of a broker, a publisher and a metrics file.

Every rank runs the same loop. Rank 0 alone speaks for the learner with broker, engines and Redis; whatever
decides what happens next is its answer, heard by all (`Ranks.share`), so that all ranks take part
in the same collectives in the same order. Payloads each rank fetches by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from common.wire import Sample
from learner.feed import Attached, Claim, Stepped, StepRow
from learner.ranks import Ranks


class SharedFeed:
    """`Feed` for all ranks: rank 0 asks, all get the answer. See there for what each method does."""

    def __init__(self, feed: Any, ranks: Ranks) -> None:
        """feed: this rank's own, a `Feed` or one of `learner.replay` (which rank 0 alone has, the others None)."""
        self._feed, self._ranks = feed, ranks

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._ranks.share(lambda: getattr(self._feed, method)(*args, **kwargs))

    def attach(self) -> Attached:
        attached = self._ask("attach")
        if self._feed is not None:
            self._feed.epoch = attached.epoch
        return attached

    def claim(self, **fields: Any) -> Claim | None:
        return self._ask("claim", **fields)

    def fetch(self, claim: Claim) -> list[Sample]:
        """Over this rank's own connection: not shared."""
        return self._feed.fetch(claim) if claim.groups else []

    def acknowledge(self, **fields: Any) -> Stepped:
        return self._ask("acknowledge", **fields)

    def give_back(self, **fields: Any) -> None:
        self._ask("give_back", **fields)

    def roll_back(self, **fields: Any) -> None:
        self._ask("roll_back", **fields)

    def checkpoint_valid(self, **fields: Any) -> None:
        self._ask("checkpoint_valid", **fields)

    def rows(self, *, after: int) -> list[StepRow]:
        return self._ask("rows", after=after)

    def validate(self, **fields: Any) -> None:
        self._ask("validate", **fields)

    def validations(self) -> list[dict[str, Any]]:
        return self._ask("validations")

    def validations_asked(self) -> list[int]:
        return self._ask("validations_asked")


class Helper:
    """Publisher and metrics writer of a rank that is not the first: takes part in gathering, keeps nothing."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take part in gathering each tensor; rank 0 keeps it."""
        for _ in tensors:
            pass

    def stats(self) -> dict[str, float]:
        return {}

    def write(self, step: int, values: dict[str, float]) -> None: ...
