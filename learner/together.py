"""What the ranks beyond the first have in place of a broker, a publisher and a metrics file.

Every rank runs the same loop. Rank 0 alone talks to the broker, the engines and Redis; whatever
decides what happens next is its answer, heard by all (`Ranks.share`), so that all ranks take part
in the same collectives in the same order.
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
        """feed: rank 0's, a `Feed` or one of `learner.replay`; None on the others."""
        self._feed, self._ranks = feed, ranks

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._ranks.share(lambda: getattr(self._feed, method)(*args, **kwargs))

    def attach(self) -> Attached:
        return self._ask("attach")

    def claim(self, **fields: Any) -> Claim | None:
        return self._ask("claim", **fields)

    def fetch(self, claim: Claim) -> list[Sample]:
        return self._ask("fetch", claim)

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
        """Gather each tensor with the others; rank 0 keeps it."""
        for _ in tensors:
            pass

    def stats(self) -> dict[str, float]:
        return {}

    def write(self, step: int, values: dict[str, float]) -> None: ...
