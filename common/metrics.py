"""The writer of metrics, to a file and to the sinks of `sinks.py`; the table of all names is in `metric_table.py`.

A name that is not in ``METRICS`` is an error under ``LEEWAY_STRICT=1`` (tests); elsewhere it is
written with a warning. ``{a,b}`` in a pattern is one of several words, ``<x>`` any one part.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from common.config import Config
from common.errors import LeewayError
from common.logs import LOGGER
from common.metric_table import declared
from common.sinks import open_sinks

FILE = "metrics.jsonl"
_log = logging.getLogger(LOGGER)


def read_metrics(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a metrics file from byte ``offset`` on, and where the next read starts."""
    rows: list[dict[str, Any]] = []
    try:
        with open(path, "rb") as f:
            f.seek(offset)
            for line in f:
                if not line.endswith(b"\n"):
                    break  # still being written
                offset += len(line)
                row = _row(line)
                if row is not None:
                    rows.append(row)
    except FileNotFoundError:
        pass
    return rows, offset


class MetricsWriter:
    """Writes each step's metrics to ``metrics.jsonl`` and to the sinks of ``trainer.logger``."""

    def __init__(self, run_dir: Path | str, config: Config, *, stream: TextIO | None = None) -> None:
        """Opens the file for appending; steps it already has are not written again.

        run_dir: folder of the run. stream: where the console sink prints (default stdout).
        """
        self._file = _JsonLines(Path(run_dir) / FILE)
        self._sinks = open_sinks(Path(run_dir), config, stream or sys.stdout)
        self._undeclared: set[str] = set()

    def has(self, step: int) -> bool:
        """Whether this step's line exists (a redone step is then not written again)."""
        return step in self._file.steps

    def write(self, step: int, values: Mapping[str, Any]) -> bool:
        """One line for ``step``; False, and nothing written, if it has one already.

        values: name → number (anything with ``float()``); what is not finite becomes null.
        """
        numbers = {name: _number(value) for name, value in values.items()}
        self._check_names(numbers)
        if self.has(step):
            return False
        self._file.write(step, numbers)
        for sink in self._sinks:
            sink.write(step, numbers)
        return True

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _check_names(self, values: Mapping[str, Any]) -> None:
        unknown = sorted(n for n in values if declared(n) is None and n not in self._undeclared)
        if not unknown:
            return
        text = f"metrics that common/metric_table.py does not declare: {', '.join(unknown)}"
        if os.environ.get("LEEWAY_STRICT") == "1":
            raise LeewayError(text)
        _log.warning(text)
        self._undeclared.update(unknown)


class _JsonLines:
    """``{"step": 3, "time": 1712.3, "critic/score/mean": 0.2, …}`` a line, flushed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, size = read_metrics(path)
        self.steps = {row["step"] for row in rows}
        self._f = open(path, "ab")  # noqa: SIM115 (kept open)
        self._f.truncate(size)  # a last line that a crash cut short

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        row = {"step": step, "time": round(time.time(), 3), **values}
        self._f.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._f.flush()
        self.steps.add(step)

    def close(self) -> None:
        self._f.close()


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return int(value)
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
