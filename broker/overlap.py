"""How much of the optimizer's time some generator sampled in. Pure; times are Unix seconds.

Generators report the spans in which requests ran, up to a time ``until``; a step's span is judged
once every generator has reported up to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Span = tuple[float, float]
_KEPT_S = 7200.0  # a span that ended so long before the latest report is forgotten
_UNMERGED = 256


class Overlap:
    def __init__(self, window: int = 8) -> None:
        """``window``: number of the latest judged steps that ``ratio`` is about."""
        self._until: dict[str, float] = {}  # by generator
        self._merged: list[Span] = []  # disjoint, in order
        self._new: list[Span] = []
        self._waiting: deque[Span] = deque(maxlen=1_000)  # optimizer spans not judged yet
        self._done = 0.0  # end of the last judged step: what was sampled before it is not asked for again
        self._judged: deque[tuple[float, float]] = deque(maxlen=window)  # (seconds overlapped, seconds)

    def sampled(self, generator: str, spans: list[Span], until: float) -> None:
        """A report of a generator: everything up to ``until`` is known now."""
        self._new.extend(spans)
        if len(self._new) > _UNMERGED:
            self._merge()
        self._until[generator] = max(until, self._until.get(generator, until))
        self._judge()

    def forget(self, generator: str) -> None:
        """A generator is gone: nobody waits for its reports any more."""
        if self._until.pop(generator, None) is not None:
            self._judge()

    def stepped(self, span: Span) -> None:
        """The optimizer worked in this time."""
        if span[1] > span[0]:
            self._waiting.append(span)
            self._judge()

    @property
    def ratio(self) -> float | None:
        """Share of the latest judged steps' seconds; None: none is judged yet."""
        total = sum(seconds for _, seconds in self._judged)
        return sum(overlap for overlap, _ in self._judged) / total if total > 0 else None

    def _judge(self) -> None:
        known = min(self._until.values(), default=0.0)
        while self._waiting and self._waiting[0][1] <= known:
            start, end = self._waiting.popleft()
            self._merge()
            self._done = max(self._done, end)
            inside = sum(max(0.0, min(b, end) - max(a, start)) for a, b in self._merged)
            self._judged.append((inside, end - start))

    def _merge(self) -> None:
        spans = union([*self._merged, *self._new])
        horizon = max(self._done, max(self._until.values(), default=0.0) - _KEPT_S)
        self._merged = [span for span in spans if span[1] > horizon]
        self._new = []


def union(spans: Iterable[Span]) -> list[Span]:
    """The same seconds as disjoint spans, in order."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > start:
            out.append((start, end))
    return out
