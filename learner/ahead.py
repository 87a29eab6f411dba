"""The next batch, claimed and fetched while this one is trained.

Consumes orders of the step (one at a time) and batches of the broker, over a connection of its own.
A thread claims, fetches and decodes, so that what is left of it to the step is to wait for what is not
there yet. With a staleness limit of 0 nothing can be claimed before the step's acknowledgement: the
order waits at the broker and is served as soon as it can be.

Each rank has one. Rank 0's claims; the others' wait at the broker until that is done, and fetch their own
shares. Which claim is trained is rank 0's word in the step; a share of another one is fetched anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import DeadlineError, FencedError, LedgerError, LeewayError, Stopped
from learner.dealing import Part, part_of
from learner.ranks import Ranks

POLL_S = 0.2  # how soon a stop is seen
TELL_S = 1.0  # between two words on what a batch waits for
SEEN_S = 5.0  # rank 0 has the claim: the broker's word of it reaches the others within so long


@dataclass
class _Order:
    """One batch on its way."""

    step: int
    claim: Any = None  # None once `claimed` is set: the data ended
    part: Part = None
    waits_for: str = ""
    error: BaseException | None = None
    claimed: threading.Event = field(default_factory=threading.Event)
    made: threading.Event = field(default_factory=threading.Event)  # or failed


class Ahead:
    """At most one order is under way; methods are for one thread."""

    def __init__(self, feed: Any, ranks: Ranks) -> None:
        """feed: a `learner.feed.Feed` that nobody else uses."""
        self._feed, self._ranks = feed, ranks
        self._order: _Order | None = None
        self._thread: threading.Thread | None = None

    @property
    def step(self) -> int | None:
        """The step whose batch is under way."""
        return None if self._order is None else self._order.step

    def order(self, *, step: int, version: int, num_groups: int) -> None:
        """Begin to get the batch of `step`, which will be trained at `version`."""
        assert self._order is None, "one order at a time"
        order = self._order = _Order(step)
        self._feed.stop.clear()

        def work() -> None:
            try:
                if self._ranks.first:
                    order.claim = self._feed.claim(
                        step=step, version=version, num_groups=num_groups,
                        on_wait=lambda reason: setattr(order, "waits_for", reason),
                    )  # fmt: skip
                else:
                    order.claim = self._feed.see_claim(step=step)
                order.claimed.set()
                if order.claim is not None:
                    order.part = part_of(order.claim, self._feed, self._ranks)
            except BaseException as e:
                order.error = e
            finally:
                order.claimed.set()
                order.made.set()

        self._thread = threading.Thread(target=work, name="next-batch", daemon=True)
        self._thread.start()

    def claim(self, *, stop: threading.Event, on_wait: Callable[[str], None]) -> Any:
        """Wait for the claim of the order under way; None: the data ended. See `part` for the errors."""
        order, told_at = self._order, time.monotonic()
        assert order is not None
        while not order.claimed.wait(POLL_S):
            self._stop_if(stop)
            if order.waits_for and time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                on_wait(order.waits_for)
        if order.error is not None or order.claim is None:
            self._end()
        if order.error is not None:
            raise order.error
        return order.claim

    def part(self, claim: Any, *, stop: threading.Event) -> Part:
        """Wait for this rank's part of the batch of `claim`.

        Raises:
            Stopped: `stop` was set; DeadlineError, LedgerError: the order is of another claim; LeewayError: what
            claiming or fetching raised. The order is over then.
        """
        order, deadline = self._order, time.monotonic() + SEEN_S
        assert order is not None
        while not order.claimed.wait(POLL_S):
            self._stop_if(stop)
            if time.monotonic() > deadline:
                self.cancel()
                raise DeadlineError(f"the broker's word that step {order.step} is claimed", SEEN_S)
        while not order.made.wait(POLL_S):
            self._stop_if(stop)
        self._end()
        if order.error is not None:
            raise order.error
        if order.claim is not claim and order.claim.groups != claim.groups:
            raise LedgerError(f"what was fetched ahead is not the batch of step {claim.step} that is trained")
        return order.part

    def cancel(self) -> None:
        """Give the order up. What it may have claimed stays claimed: claim it again, or give it back."""
        if self._order is not None:
            self._feed.stop.set()
            self._end()

    def close(self) -> None:
        self.cancel()
        self._feed.close()

    def _stop_if(self, stop: threading.Event) -> None:
        if stop.is_set():
            self.cancel()
            raise Stopped("a batch")

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._order = self._thread = None


def can_be_mended(error: BaseException) -> bool:
    """Whether asking again, in step, may succeed: the broker was away for long, or refused what has changed since."""
    return isinstance(error, LeewayError) and not isinstance(error, (Stopped, FencedError))
