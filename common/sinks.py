"""Where metrics go beside ``metrics.jsonl``: console, wandb, TensorBoard, Prometheus (``trainer.logger``).

A sink takes the numbers of a step, None where one is not finite. A fault of one is a warning and ends
that sink, never the run.
"""

from __future__ import annotations

import logging
import netrc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from common.config import Config
from common.logs import LOGGER
from common.metric_table import METRICS, declared

_log = logging.getLogger(LOGGER)
Numbers = dict[str, float | None]
MAX_SERIES = 500  # of Prometheus; a step has half as many, beside its parts of the reward


class Sink(Protocol):
    def write(self, step: int, values: Numbers) -> None: ...

    def close(self) -> None: ...


def open_sinks(run_dir: Path, config: Config, stream: TextIO) -> list[Sink]:
    """The sinks of ``trainer.logger``. stream: where the console sink prints."""
    sinks: dict[str, Callable[[], Sink]] = {
        "console": lambda: Console(stream),
        "wandb": lambda: Wandb(run_dir, config),
        "tensorboard": lambda: TensorBoard(run_dir / "tensorboard"),
        "prometheus": lambda: Prometheus(str(config.run.id), config.run.bind_host, config.trainer.prometheus_port),
    }
    return [Guarded(name, sinks[name]) for name in config.trainer.logger]


class Guarded:
    """A sink whose first fault ends it."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self.sink: Sink | None = None  # None: it has ended
        with self._guard():
            self.sink = make()

    def write(self, step: int, values: Numbers) -> None:
        with self._guard():
            if self.sink is not None:
                self.sink.write(step, values)

    def close(self) -> None:
        with self._guard():
            if self.sink is not None:
                self.sink.close()
        self.sink = None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.sink = None
            _log.warning("%s is switched off for this run: %s", self._name, str(e) or type(e).__name__)


class Console:
    """``step:12 - critic/score/mean:0.125 - …`` a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, step: int, values: Numbers) -> None:
        print(format_line(step, values), file=self._stream, flush=True)

    def close(self) -> None: ...


def format_line(step: int, values: Mapping[str, Any]) -> str:
    """``step:12 - critic/score/mean:0.125 - …``, as verl prints it."""
    return " - ".join([f"step:{step}", *(f"{k}:{_short(v)}" for k, v in values.items())])


class Wandb:
    """Offline without a key."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run = _start_wandb(run_dir, config)

    def write(self, step: int, values: Numbers) -> None:
        self._run.log(_finite(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """``tensorboard --logdir RUN_DIR/tensorboard``"""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Numbers) -> None:
        for name, value in _finite(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """The numbers of the newest step at ``http://HOST:PORT/metrics``, as ``leeway_critic_score_mean{run="…"}``.

    What the step does not have is not there. Of names that become one (``a-b``, ``a_b``) the first is there, and no
    more than ``MAX_SERIES`` are.
    """

    def __init__(self, run_id: str, host: str, port: int) -> None:
        """port: 0: any that is free; the log says which.

        Raises:
            OSError: it cannot be had.
        """
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry, self._gauge, self._run_id = CollectorRegistry(), Gauge, run_id
        self._gauges: dict[str, Any] = {}  # by metric
        self._said = False  # that some are left out
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as e:
            raise OSError(f"trainer.prometheus_port={port}: {e.strerror}; take another, or 0") from e
        self.port = int(self._server.server_port)
        _log.info("Prometheus finds the metrics at http://%s:%d/metrics", host, self.port)

    def write(self, step: int, values: Numbers) -> None:
        values = {"step": step, **values}
        shown = self._shown(values)
        for name in self._gauges.keys() - shown.keys():
            self._registry.unregister(self._gauges.pop(name))
        for name, series in shown.items():
            if name not in self._gauges:
                unit, meaning = METRICS.get(declared(name) or "", ("1", name))
                self._gauges[name] = self._gauge(series, f"{meaning} [{unit}]", ["run"], registry=self._registry)
            value = values[name]
            self._gauges[name].labels(self._run_id).set(float("nan") if value is None else value)

    def _shown(self, values: Numbers) -> dict[str, str]:
        """Metric -> series."""
        metrics: dict[str, str] = {}
        for name in values:
            metrics.setdefault("leeway_" + re.sub(r"\W", "_", name, flags=re.ASCII), name)
        shown = {name: series for series, name in list(metrics.items())[:MAX_SERIES]}
        if not self._said and (left := [name for name in values if name not in shown]):
            self._said = True
            _log.warning(
                "prometheus: %s%s left out: at most %d metrics, and of names that are one to Prometheus the first",
                left[0], f" and {len(left) - 1} more are" if len(left) > 1 else " is", MAX_SERIES,
            )  # fmt: skip
        return shown

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _finite(values: Numbers) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


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


def _short(value: Any) -> str:
    return "nan" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"
