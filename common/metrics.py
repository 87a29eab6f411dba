"""Metrics: the table of all names, and the writer with its sinks. The only wandb import.

A name that is not in ``METRICS`` is an error under ``LEEWAY_STRICT=1`` (tests); elsewhere it is
written with a warning. ``{a,b}`` in a pattern is one of several words, ``<x>`` any one part.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from common.config import Config
from common.errors import LeewayError
from common.logs import LOGGER
from common.metric_table import declared

FILE = "metrics.jsonl"
_log = logging.getLogger(LOGGER)


def format_line(step: int, values: Mapping[str, Any]) -> str:
    """``step:12 - critic/score/mean:0.125 - …``, as verl prints it."""
    return " - ".join([f"step:{step}", *(f"{k}:{_short(v)}" for k, v in values.items())])


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


class Sink(Protocol):
    def write(self, step: int, values: dict[str, float | None]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes each step's metrics to ``metrics.jsonl`` and to the sinks of ``trainer.logger``."""

    def __init__(self, run_dir: Path | str, config: Config, *, stream: TextIO | None = None) -> None:
        """Opens the file for appending; steps it already has are not written again.

        run_dir: folder of the run. stream: where the console sink prints (default stdout).
        """
        self._file = _JsonLines(Path(run_dir) / FILE)
        self._sinks: list[Sink] = []
        if "console" in config.trainer.logger:
            self._sinks.append(_Console(stream or sys.stdout))
        if "wandb" in config.trainer.logger:
            self._sinks.append(_Wandb(Path(run_dir), config))
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


class _Console:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, step: int, values: dict[str, float | None]) -> None:
        print(format_line(step, values), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _Wandb:
    """Offline without a key. A fault of wandb is a warning and ends this sink, never the run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run: Any = None
        try:
            self._run = _start_wandb(run_dir, config)
        except Exception as e:
            self._give_up(e)

    def write(self, step: int, values: dict[str, float | None]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({k: v for k, v in values.items() if v is not None}, step=step)
        except Exception as e:
            self._give_up(e)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as e:
            self._give_up(e)
        self._run = None

    def _give_up(self, e: Exception) -> None:
        self._run = None
        _log.warning("wandb is switched off for this run: %s", str(e) or type(e).__name__)


def _start_wandb(run_dir: Path, config: Config) -> Any:
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
    if mode == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing at all leaves this machine
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb.init(
        project=config.trainer.project_name,
        name=config.trainer.experiment_name or config.run.id,
        id=config.run.id,
        resume="allow" if mode == "online" else None,
        dir=run_dir,
        mode=mode,
        config=config.model_dump(mode="json", exclude={"run": {"redis_url"}}),
        save_code=False,
        settings=wandb.Settings(
            console="off",
            x_disable_stats=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            quiet=True,
        ),
    )


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


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


def _short(value: Any) -> str:
    return "nan" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"
