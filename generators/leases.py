"""What a generator holds: leases it works on and samples the broker has not acknowledged yet.

Pure: no socket, no task, the clock is passed in. A lease ends when each of its samples is made;
a sample is forgotten only when the broker says that it is stored (or that it does not matter any
more), and is sent again until then. The broker drops duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LeaseKey = tuple[int, int]  # group, attempt
SampleKey = tuple[int, int, int]  # group, attempt, index
Frames = list[bytes]


@dataclass
class Lease:
    """The missing samples of one group attempt."""

    group: int
    attempt: int
    lane: str  # "train" or "eval"
    row: dict[str, Any]
    prompt_ids: list[int]
    running: set[int] = field(default_factory=set)  # indices of samples being made
    tokens: dict[int, int] = field(default_factory=dict)  # made so far, by index
    prompt_array: NDArray[np.int32] = field(init=False)  # [prompt]

    def __post_init__(self) -> None:
        self.prompt_array = np.array(self.prompt_ids, dtype=np.int32)

    @property
    def key(self) -> LeaseKey:
        return self.group, self.attempt


@dataclass
class _Sent:
    frames: Frames
    at: float  # seconds of the caller's clock


class Holdings:
    """Leases and unacknowledged samples of one generator."""

    def __init__(self) -> None:
        self.leases: dict[LeaseKey, Lease] = {}
        self._unacked: dict[SampleKey, _Sent] = {}  # oldest first

    @property
    def num_unacked(self) -> int:
        return len(self._unacked)

    def open(self, lease: Lease, indices: Iterable[int]) -> tuple[Lease, list[int], list[Frames]]:
        """The lease to work on (the one held already, if it is repeated), the samples to start, those to send again.

        Samples that run, or are made and not yet acknowledged, are not started again.
        """
        work = self.leases.get(lease.key, lease)
        made = [self._unacked[k].frames for i in indices if (k := (*lease.key, i)) in self._unacked]
        new = [i for i in indices if i not in work.running and (*lease.key, i) not in self._unacked]
        work.running.update(new)
        if work.running:
            self.leases[lease.key] = work
        return work, new, made

    def finish(self, lease: Lease, index: int, frames: Frames, now: float) -> bool:
        """A sample is made; False if the lease was cancelled meanwhile (then it is worth nothing)."""
        if self.leases.get(lease.key) is not lease:
            return False
        self._leave(lease, index)
        self._unacked[(*lease.key, index)] = _Sent(frames, now)
        return True

    def _leave(self, lease: Lease, index: int) -> None:
        lease.running.discard(index)
        if not lease.running:
            del self.leases[lease.key]

    def drop(self, key: LeaseKey) -> Lease | None:
        """Forget a lease and its samples: it was cancelled or given back."""
        for sample in [k for k in self._unacked if k[:2] == key]:
            del self._unacked[sample]
        return self.leases.pop(key, None)

    def acknowledge(self, keys: Iterable[SampleKey]) -> None:
        for key in keys:
            self._unacked.pop(tuple(key), None)  # type: ignore[arg-type]

    def overdue(self, now: float, after_s: float) -> list[Frames]:
        """Samples sent more than ``after_s`` seconds ago and not acknowledged; they count as sent again now."""
        late = []
        for sent in self._unacked.values():
            if now - sent.at >= after_s:
                sent.at = now
                late.append(sent.frames)
        return late

    def progress(self) -> list[list[int]]:
        """``[group, attempt, tokens made]`` of each lease; only rising numbers renew it."""
        return [[g, a, sum(lease.tokens.values())] for (g, a), lease in self.leases.items()]
