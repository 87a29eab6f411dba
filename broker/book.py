"""The ledger's books: every attempt that is still open, where it stands, what changed since the last write.

Only bookkeeping, no rule about who may do what (that is ``ledger.py``). Training attempts always sum
up: ``issued = pending + leased + ready + claimed + trained + dropped``; ended ones are counted and
forgotten, so memory is bounded by what is open.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace

from broker.records import (
    LANES,
    Attempt,
    Changes,
    Claim,
    Counters,
    Drops,
    Key,
    Lane,
    Rules,
    Snapshot,
    State,
    Validation,
)
from common.config import MAX_ATTEMPTS

ROLLED_BACK = "rolled_back"  # outstanding when the run went back to a checkpoint
NO_SIGNAL = "no_signal"  # all rewards of a group are equal: nothing was wrong with it
Cancel = tuple[str, Key, str]  # (generator, group attempt, reason)


class Book:
    def __init__(self, rules: Rules, *, limit: int, snapshot: Snapshot | None = None, now: float = 0.0) -> None:
        """A new ledger, or the one of ``snapshot``; leases found in it start anew at ``now``."""
        self.rules = rules
        self.limit = limit  # η in force
        self.counters = Counters()
        self.live: dict[Key, Attempt] = {}
        self.claims: list[Claim] = []  # the batch that is trained, and the one fetched ahead
        self.counts: dict[Lane, Counter[State]] = {lane: Counter() for lane in LANES}
        self.drops: dict[str, Drops] = {}
        self.validations: dict[int, Validation] = {}
        self.attached: tuple[str, str] | None = None
        self.checkpoints: list[int] = []  # steps of the valid ones that can be gone back to, ascending
        self.abandoned: list[tuple[int, int]] = []  # (first, last) step that rollbacks gave up, ascending, disjoint
        self.untrained_bytes = 0  # payloads of the groups that are open
        self.cancels: list[Cancel] = []  # to be told to generators; the caller empties it
        self._pending: dict[Lane, list[Key]] = {lane: [] for lane in LANES}  # heaps: the oldest prompt first
        self._leased: dict[str, dict[Key, Attempt]] = {}  # by generator
        self._owed: Counter[str] = Counter()  # samples that are still to come, by generator
        self._ready: dict[Key, Attempt] = {}
        self._lost: Counter[str] = Counter()  # attempts at fault since a group was complete, by reason
        self._num_filtered = 0  # groups without signal since the last batch was claimed
        self._waits: tuple[int, float] | None = None  # policy `wait`: (step, since when it is held back)
        self._expiries: list[tuple[float, Key]] = []  # heap; a renewed lease is looked at again when its entry is due
        self._changes = Changes(counters=self.counters)
        self._dirty: dict[Key, Attempt] = {}
        if snapshot is not None:
            self._restore(snapshot, now)

    @property
    def outstanding(self) -> int:
        """N = leased + ready + claimed."""
        counts = self.counts["train"]
        return counts["leased"] + counts["ready"] + counts["claimed"]

    @property
    def claimed(self) -> Claim | None:
        """The batch of the step that is acknowledged next."""
        return self.claims[0] if self.claims else None

    @property
    def checkpoint(self) -> int:
        """Step of the newest valid checkpoint; -1: none."""
        return self.checkpoints[-1] if self.checkpoints else -1

    @property
    def issued(self) -> int:
        return sum(self.counts["train"].values())

    def snapshot(self) -> Snapshot:
        """Everything a restored ledger has to equal (leases' times aside)."""
        return Snapshot(
            counters=replace(self.counters),
            live=sorted(self.live.values(), key=lambda a: a.key),
            claims=tuple(self.claims),
            validations=[replace(v) for _, v in sorted(self.validations.items())],
            counts={lane: {s: n for s, n in self.counts[lane].items() if n} for lane in LANES},
            drops=self.drops,
            attached=self.attached,
            checkpoints=list(self.checkpoints),
            abandoned=list(self.abandoned),
        )

    # ------------------------------------------------------------ moves
    def _new_group(self) -> int:
        group = self.counters.next_group
        self.counters.next_group += 1
        return group

    def _issue(self, attempt: Attempt, *, wait: bool = True) -> None:
        self.live[attempt.key] = attempt
        self.counts[attempt.lane]["pending"] += 1
        self._dirty[attempt.key] = attempt
        if wait:
            heapq.heappush(self._pending[attempt.lane], attempt.key)

    def _move(self, attempt: Attempt, state: State) -> None:
        counts = self.counts[attempt.lane]
        counts[attempt.state] -= 1
        counts[state] += 1
        if attempt.state == "leased" and attempt.generator is not None:
            if self._leased[attempt.generator].pop(attempt.key, None) is not None:
                self._owed[attempt.generator] -= attempt.missing
        elif attempt.state == "ready":
            del self._ready[attempt.key]
        attempt.state = state
        if state == "ready":
            self._ready[attempt.key] = attempt
        elif state == "pending":
            heapq.heappush(self._pending[attempt.lane], attempt.key)
        self._dirty[attempt.key] = attempt

    def _hand_out(self, attempt: Attempt, generator: str) -> None:
        self._leased.setdefault(generator, {})[attempt.key] = attempt
        self._owed[generator] += attempt.missing
        heapq.heappush(self._expiries, (self._expiry(attempt), attempt.key))

    def _end(self, attempt: Attempt, state: State) -> None:
        self._move(attempt, state)
        del self.live[attempt.key]
        self.untrained_bytes -= attempt.num_bytes

    def _drop(self, attempt: Attempt, reason: str, *, retry: bool, tell: bool = True, counted: bool = True) -> None:
        if attempt.state == "leased" and tell and attempt.generator is not None:
            self.cancels.append((attempt.generator, attempt.key, reason))
        attempt.reason = reason
        self._end(attempt, "dropped")
        if attempt.lane == "train":
            self.drops.setdefault(reason, Drops()).add(attempt.num_tokens, attempt.size)
        may = MAX_ATTEMPTS if not counted else self.rules.max_attempts
        if retry and attempt.attempt + 1 < may:
            self._issue(
                Attempt(
                    attempt.group,
                    attempt.attempt + 1,
                    attempt.lane,
                    attempt.prompt,
                    attempt.size,
                    held=attempt.held if attempt.lane == "eval" else -1,
                    step=attempt.step if attempt.lane == "eval" else None,
                )
            )
        elif attempt.lane == "train":
            self.counters.num_exhausted += reason != NO_SIGNAL
        elif (validation := self.validations.get(attempt.step if attempt.step is not None else -1)) is not None:
            validation.num_dropped += 1
            self._set_validation(validation)

    def _set_validation(self, validation: Validation) -> None:
        self.validations[validation.step] = validation
        self._changes.validations.append(validation)

    def _expiry(self, attempt: Attempt) -> float:
        rules = self.rules
        return min(attempt.renewed_at + rules.lease_timeout_s, attempt.leased_at + rules.lease_limit_s)

    # ------------------------------------------------------------ to and from the store
    def take_changes(self) -> Changes | None:
        """What happened since the last call, for one transaction; None: nothing."""
        changes = self._changes
        changes.attempts, changes.claims = list(self._dirty.values()), tuple(self.claims)
        if not (changes.attempts or changes.steps or changes.epochs or changes.checkpoints or changes.validations):
            return None
        self._dirty = {}
        self._changes = Changes(counters=self.counters)
        return changes

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        self.counters = replace(snapshot.counters)
        self._changes = Changes(counters=self.counters)
        self.claims = list(snapshot.claims)
        self.attached = snapshot.attached
        self.checkpoints, self.abandoned = list(snapshot.checkpoints), list(snapshot.abandoned)
        self.drops = dict(snapshot.drops)
        self.counts = {lane: Counter(snapshot.counts[lane]) for lane in LANES}
        self.validations = {v.step: v for v in snapshot.validations}
        for attempt in snapshot.live:
            self.live[attempt.key] = attempt
            self.untrained_bytes += attempt.num_bytes
            if attempt.state == "pending":
                heapq.heappush(self._pending[attempt.lane], attempt.key)
            elif attempt.state == "ready":
                self._ready[attempt.key] = attempt
            elif attempt.state == "leased" and attempt.generator is not None:
                there = sum(h["num_tokens"] for h in attempt.samples.values())
                attempt.num_tokens = max(attempt.num_tokens, there)
                attempt.num_tokens_before = there if attempt.num_leases > 1 else 0
                attempt.leased_at = attempt.renewed_at = now
                self._hand_out(attempt, attempt.generator)
