"""What the launcher shows: a live table on a terminal, plain lines elsewhere.

Fed by the launcher's loop from ``metrics.jsonl``, the roles' log files and the registry.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.config import Config
from common.control import Entry
from common.metrics import FILE, read_metrics
from common.sinks import format_line

_BARS = "▁▂▃▄▅▆▇█"
_REDRAW_S = 0.5
_SHOWN_LINES = 6
STATES = ("pending", "leased", "ready", "claimed", "trained", "dropped")
Row = dict[str, Any]


class Console(Protocol):
    def note(self, line: str) -> None:
        """One line of news."""

    def tick(self) -> None:
        """Show what is new; called often."""

    def close(self) -> None: ...


def make_console(
    config: Config,
    run_dir: Path,
    entries: Callable[[], list[Entry]],
    desired: Callable[[], str],
    out: TextIO = sys.stdout,
) -> Console:
    """The live table if ``out`` is a terminal."""
    feed = Feed(run_dir)
    if out.isatty():
        return LiveTable(config, feed, entries, desired, out)
    return PlainLines(feed, out, steps="console" in config.trainer.logger)


class Feed:
    """New rows of ``metrics.jsonl`` and new lines of the roles' log files."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / FILE
        self._logs = run_dir / "logs"
        self.history, self._offset = read_metrics(self._metrics)
        self._places = {path: path.stat().st_size for path in self._log_files()}

    def rows(self) -> list[Row]:
        """Rows since the last call; also kept in ``history``."""
        rows, self._offset = read_metrics(self._metrics, self._offset)
        self.history += rows
        return rows

    def lines(self) -> list[str]:
        """Whole log lines since the last call."""
        found: list[str] = []
        for path in self._log_files():
            with open(path, "rb") as f:
                f.seek(self._places.get(path, 0))
                data = f.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            found += whole.decode(errors="replace").splitlines()
        return sorted(_without_date(line) for line in found)

    def _log_files(self) -> Iterable[Path]:
        return sorted(self._logs.glob("*.log"))


def _without_date(line: str) -> str:
    """The files' lines begin with the date; the screen does without."""
    return line[11:] if line[4:5] == "-" and line[10:11] == " " else line


class PlainLines:
    """``step:N - k:v`` for each step and the roles' log lines in between."""

    def __init__(self, feed: Feed, out: TextIO, *, steps: bool = True) -> None:
        self._feed, self._out, self._steps = feed, out, steps

    def note(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def tick(self) -> None:
        for line in self._feed.lines():
            self.note(line)
        for row in self._feed.rows() if self._steps else ():
            values = {k: v for k, v in row.items() if k not in ("step", "time")}
            self.note(format_line(row["step"], values))

    def close(self) -> None:
        self.tick()


class LiveTable:
    def __init__(
        self, config: Config, feed: Feed, entries: Callable[[], list[Entry]], desired: Callable[[], str], out: TextIO
    ) -> None:
        self._config, self._feed, self._entries, self._desired = config, feed, entries, desired
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._started, self._drawn = time.monotonic(), 0.0
        self._last_entries: list[Entry] = []
        self._live = Live(console=RichConsole(file=out), auto_refresh=False, transient=False)
        self._live.start()

    def note(self, line: str) -> None:
        self._lines.append(line)

    def tick(self) -> None:
        self._lines.extend(self._feed.lines())
        self._feed.rows()
        if time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw()

    def close(self) -> None:
        self.tick()
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        seconds = int(self._drawn - self._started)
        self._last_entries = self._entries() or self._last_entries  # at the end all have left
        view = render(
            self._config, self._feed.history, self._last_entries, self._desired(), list(self._lines), seconds=seconds
        )
        self._live.update(view, refresh=True)


# ---------------------------------------------------------------- drawing (pure)
def render(
    config: Config, rows: list[Row], entries: list[Entry], desired: str, lines: list[str], *, seconds: int
) -> RenderableType:
    """The whole table."""
    last = rows[-1] if rows else {}
    figures = Table.grid(padding=(0, 2))
    for name, value in [
        ("step", f"{last.get('step', 0)} of {config.run.max_steps}   {seconds // 60}:{seconds % 60:02d}"),
        ("score", _score(config, rows)),
        ("staleness", f"mean {_f(last, 'staleness/mean', 2)}  max {_f(last, 'staleness/max', 0)}"
                      f"  limit {_f(last, 'staleness/limit', 0)}"),
        ("groups", "  ".join(f"{state} {_f(last, f'queue/{state}', 0)}" for state in STATES)),
        ("tokens/s", f"sampled {_f(last, 'generator/tokens_per_s', 0)}  trained {_f(last, 'perf/throughput', 0)}"),
        ("idle", f"learner {_p(last, 'trainer/idle_ratio')}  generators {_p(last, 'generator/idle_ratio')}"
                 f"  overlap {_p(last, 'generator/overlap_ratio')}"),
    ]:  # fmt: skip
        figures.add_row(Text(name, style="bold"), value)
    parts: list[RenderableType] = [figures, "", processes(entries)]
    if lines:
        parts += ["", Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")]
    return Panel(Group(*parts), title=f"{config.run.id} · {desired}", title_align="left")


def processes(entries: list[Entry]) -> Table:
    """One line per process of the registry."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for heading in ("process", "pid", "version"):
        table.add_column(heading, header_style="bold", no_wrap=True, min_width=7)
    table.add_column("state", header_style="bold", no_wrap=True, overflow="ellipsis", ratio=1)
    order = {"broker": 0, "learner": 1}
    for e in sorted(entries, key=lambda e: (order.get(e.role, 2), e.name)):
        table.add_row(e.name, str(e.pid), "–" if e.version < 0 else str(e.version), e.state)
    return table


def sparkline(values: list[float], width: int = 40) -> str:
    """The values as bars from 0 (or the smallest, if below) to 1 (or the largest, if above)."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    bins = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(0.0, *bins), max(1.0, *bins)
    return "".join(_BARS[min(7, int(8 * (v - low) / (high - low)))] for v in bins)


def _score(config: Config, rows: list[Row]) -> str:
    scores = [r["critic/score/mean"] for r in rows if isinstance(r.get("critic/score/mean"), (int, float))]
    if not scores:
        return "no step yet"
    window = scores[-config.run.goal_window :]
    goal = f" (goal {config.run.goal_score:g})" if config.run.goal_score is not None else ""
    return f"{sparkline(scores)} {scores[-1]:.3f}, mean of {len(window)}: {sum(window) / len(window):.3f}{goal}"


def _f(row: Row, name: str, digits: int) -> str:
    value = row.get(name)
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else "–"


def _p(row: Row, name: str) -> str:
    value = row.get(name)
    return f"{value:.0%}" if isinstance(value, (int, float)) else "–"
