"""When this generator sampled, and how much. Pure: the clock (Unix seconds) is passed in.

The spans say in which time at least one request ran; they are cut at each report, so that the
broker knows everything up to the report and nothing beyond.
"""

from __future__ import annotations

MEMORY_S = 2.0


class Activity:
    def __init__(self, now: float) -> None:
        self.running = 0  # requests in the engine
        self.tokens = 0  # sampled since the start
        self.samples = 0  # finished since the start
        self.samples_per_s = 0.0  # finished lately, over about `MEMORY_S`
        self._samples_before = 0
        self._since = now  # of the last report
        self._busy_since: float | None = None
        self._spans: list[list[float]] = []

    def begin(self, now: float) -> None:
        self.running += 1
        if self.running == 1:
            self._busy_since = now

    def end(self, now: float) -> None:
        self.running -= 1
        if self.running == 0 and self._busy_since is not None:
            self._spans.append([self._busy_since, max(now, self._busy_since)])  # clocks are set back at times
            self._busy_since = None

    def report(self, now: float) -> tuple[list[list[float]], dict[str, float]]:
        """Spans since the last report, and figures.

        ``idle_ratio`` is the share of the time since the last report in which nothing ran;
        ``until`` the time up to which everything is reported.
        """
        spans, self._spans = self._spans, []
        now = max(now, self._since)
        if self._busy_since is not None:
            spans.append([self._busy_since, max(now, self._busy_since)])
            self._busy_since = spans[-1][1]
        elapsed = now - self._since
        busy = sum(end - start for start, end in spans)
        if elapsed > 0:
            rate = (self.samples - self._samples_before) / elapsed
            self.samples_per_s += (rate - self.samples_per_s) * min(1.0, elapsed / MEMORY_S)
            self._samples_before = self.samples
        self._since = now
        return spans, {
            "tokens": self.tokens,
            "samples": self.samples,
            "running": self.running,
            "idle_ratio": 1.0 - min(busy / elapsed, 1.0) if elapsed > 0 else 0.0,
            "until": now,
        }
