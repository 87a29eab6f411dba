"""How every role starts and ends: arguments, config, logging, signals, registry.

``python -m broker|learner|generators --redis-url URL --run-id ID [--name NAME] [CONFIG.yaml …] [a.b=c …]``

The Redis URL may also come from ``LEEWAY_REDIS_URL``, so that its password is not in ``ps``. The
first role that was given a config stores it in Redis; the others take it from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from common import failpoints, logs, processes
from common.config import HOST_KEYS, Config
from common.control import Control
from common.errors import ConfigError, ControlError, LeewayError, Stopped
from common.loading import differences, load_config

RoleName = Literal["broker", "learner", "generator"]
ERROR_FILE = "LEEWAY_ERROR_FILE"  # where the supervisor wants to read why this process ended
CONNECT_S = 15.0


@dataclass
class Role:
    """A started role."""

    name: str  # "broker", "learner", "generator-<host>-<number>"
    config: Config
    control: Control
    run_dir: Path
    stop: threading.Event  # set by SIGTERM, SIGINT, or the desired state `stopped`
    log: logging.Logger
    begun: str = ""  # what the run's registry calls this beginning of the run


def start_role(role: RoleName, argv: list[str], *, name: str | None = None) -> Role:
    """Everything up to the point where the role's own work begins.

    Raises:
        ConfigError: bad arguments or config, or another config than the run's.
        ControlError: Redis cannot be reached.
        DeadlineError: nobody has given the run a config.
    """
    if processes.wants_to_die_with_parent():
        processes.die_with_parent()
    failpoints.arm()
    args = _parser(role).parse_intermixed_args(argv)
    name = args.name or name or _default_name(role)
    stop = _stop_on_signals()
    log = logs.set_up(name)
    url, run_id = _where(args)
    files, overrides = _split(args.config)
    given, host_values = _given_config(files, overrides, run_id)
    control = Control(url, run_id, deadline_s=CONNECT_S, stop=stop)
    try:
        config, begun = _agree(control, role, given, host_values, stop)
        run_dir = Path(config.run.dir or f"runs/{run_id}")
        log = logs.set_up(name, run_dir / "logs")
        _refuse_a_stopping_run(control, name)
    except BaseException:
        control.close()
        raise
    _stop_when_desired(control, role, stop, config.run.stop_timeout_s)
    return Role(name=name, config=config, control=control, run_dir=run_dir, stop=stop, log=log, begun=begun)


def run_role(
    main: Callable[[Role], int | None], role: RoleName, argv: list[str] | None = None, *, name: str | None = None
) -> int:
    """``end_process(run_role(main, "broker", sys.argv[1:]))``: the exit code of the process.

    A LeewayError is one clear line, the last thing on stderr; any other exception also has its
    traceback before it (and in the log file).
    """
    started: Role | None = None
    try:
        started = start_role(role, sys.argv[1:] if argv is None else argv, name=name)
        return main(started) or 0
    except Stopped:
        return 0
    except KeyboardInterrupt:
        return 130
    except LeewayError as e:
        return _report(started, role, str(e), e.exit_code, None)
    except Exception as e:
        return _report(started, role, f"{type(e).__name__}: {e}", 1, traceback.format_exc())
    finally:
        if started is not None:
            started.control.close()


def end_process(code: int) -> NoReturn:
    """End now: an interpreter that takes torch and vLLM apart needs seconds, and has nothing left to do.

    The role has closed its sockets, files and children by then; what is written is flushed here.
    """
    for handler in logging.getLogger(logs.LOGGER).handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every role takes."""
    parser.add_argument("--redis-url", help="Redis of the run (default: $LEEWAY_REDIS_URL)")
    parser.add_argument("--run-id", help="id of the run (default: run.id of the config)")
    parser.add_argument("--name", help="name of this process in the registry")
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | a.b=c", help="give it to exactly one role")


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=role, allow_abbrev=False)
    add_arguments(parser)
    return parser


def _default_name(role: str) -> str:
    return f"generator-{socket.gethostname()}-{os.getpid()}" if role == "generator" else role


def _split(items: list[str]) -> tuple[list[str], list[str]]:
    """(files, overrides); an override is what has a `=`."""
    return [i for i in items if "=" not in i], [i for i in items if "=" in i]


def _where(args: argparse.Namespace) -> tuple[str, str]:
    """(Redis URL, run id) of the arguments, else of the environment, else of the config."""
    url, run_id = args.redis_url or os.environ.get("LEEWAY_REDIS_URL"), args.run_id
    files, overrides = _split(args.config)
    if (url is None or run_id is None) and files:
        config = load_config(files, overrides)
        url = url or config.run.redis_url
        run_id = run_id or _stated_run_id(config, files, overrides)
    faults = []
    if not url:
        faults.append("--redis-url: give the Redis of the run (or LEEWAY_REDIS_URL, or run.redis_url in the config)")
    if not run_id:
        faults.append("--run-id: give the id of the run (or run.id in the config)")
    if faults or url is None or run_id is None:
        raise ConfigError(faults)
    return url, run_id


def _stated_run_id(config: Config, files: list[str], overrides: list[str]) -> str | None:
    """``run.id`` if the config states one (a default one differs from process to process)."""
    later = load_config(files, overrides, now=0.0)
    return config.run.id if later.run.id == config.run.id else None


def _given_config(files: list[str], overrides: list[str], run_id: str) -> tuple[Config | None, dict[str, str]]:
    """The config this process was given, if any, and its host's own values."""
    host_values = {k: v for k, _, v in (o.partition("=") for o in overrides) if k in HOST_KEYS}
    rest = [o for o in overrides if o.partition("=")[0] not in HOST_KEYS]
    if not files and not rest:
        return None, host_values
    return load_config(files, [*overrides, f"run.id={run_id}"]), host_values


def _agree(
    control: Control, role: str, given: Config | None, host_values: dict[str, str], stop: threading.Event
) -> tuple[Config, str]:
    """The run's config with this host's own values in it, and what its registry calls this beginning."""
    if given is not None:
        return given, store_config(control, given)
    deadline_s = Config().run.start_timeout_s
    text = control.wait_for_config(deadline_s=deadline_s, stop=stop)
    config, needs_reward_file = read_config(text)
    if role == "generator" and needs_reward_file and "reward.custom_function.path" not in host_values:
        raise ConfigError(
            "reward.custom_function.path: this run has a reward function in a file, which is never taken from Redis; "
            "give reward.custom_function.path=FILE on this host's command line"
        )
    overrides = [f"{k}={v}" for k, v in host_values.items()]
    config = load_config([], [*_as_overrides(config), *overrides]) if overrides else config
    return config, _begun(text)


def store_config(control: Control, config: Config) -> str:
    """Make ``config`` the run's, or check that the run's is the same; what the registry calls this beginning.

    Raises:
        ConfigError: with the differences.
    """
    standing = control.store_config(_shared_text(config))
    theirs, _ = read_config(standing)
    ours, _ = read_config(_shared_text(config))
    if faults := differences(ours, theirs):
        raise ConfigError(
            [f"run {control.run_id} at {control.address} already has another config (here != there):", *faults]
        )
    return _begun(standing)


def read_config(text: str) -> tuple[Config, bool]:
    """A config as stored in Redis, and whether generators must name a reward file themselves."""
    try:
        stored = json.loads(text)
        return Config.model_validate(stored["config"]), bool(stored["needs_reward_file"])
    except (ValueError, KeyError, TypeError) as e:
        raise ControlError(f"the config in Redis cannot be read ({e}); run the same Leeway everywhere") from e


def _begun(text: str) -> str:
    return str(json.loads(text).get("begun", ""))


def _shared_text(config: Config) -> str:
    tree = config.model_dump(mode="json")
    needs_reward_file = bool(tree["reward"]["custom_function"]["path"])
    tree["reward"]["custom_function"]["path"] = None
    tree["model"]["trust_remote_code"] = False
    tree["trainer"]["resume_from_path"] = None
    tree["run"]["redis_url"] = None
    begun = secrets.token_hex(8)
    return json.dumps({"config": tree, "needs_reward_file": needs_reward_file, "begun": begun}, indent=1)


def _as_overrides(config: Config) -> list[str]:
    return [f"{k}={json.dumps(v)}" for k, v in config.model_dump(mode="json").items()]


def _refuse_a_stopping_run(control: Control, name: str) -> None:
    """A stopped run is started again by its first role, unless others are still going down."""
    control.refresh()
    if control.desired() != "stopped":
        return
    others = [e.name for e in control.entries() if e.name != name]
    if others:
        raise ControlError(
            f"run {control.run_id} is being stopped ({', '.join(others)} still there); start it again later"
        )
    control.set_desired("running", name)


def _stop_on_signals() -> threading.Event:
    """SIGTERM and SIGINT set the event; a second SIGINT ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            os._exit(130)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
    return stop


def _stop_when_desired(control: Control, role: str, stop: threading.Event, grace_s: float) -> None:
    """The desired state `stopped` sets ``stop``; for the broker only once no learner needs it any more."""
    since: list[float] = []

    def look() -> None:
        if control.desired() != "stopped":
            since.clear()
        elif not stop.is_set():
            since.append(time.monotonic())
            if role != "broker" or not control.entries("learner") or time.monotonic() - since[0] > grace_s:
                stop.set()

    control.on_refresh(look)


def _report(started: Role | None, role: str, text: str, exit_code: int, trace: str | None) -> int:
    """Say why this process ends: log file, the supervisor's error file, and last of all stderr."""
    name = started.name if started else role
    if trace:
        print(trace, file=sys.stderr)
    if started:
        for handler in started.log.handlers:
            if isinstance(handler, logging.FileHandler):
                record: Any = started.log.makeRecord(started.log.name, logging.ERROR, "", 0, trace or text, (), None)
                handler.handle(record)
    if path := os.environ.get(ERROR_FILE):
        try:
            Path(path).write_text(json.dumps({"name": name, "exit_code": exit_code, "error": text}), encoding="utf-8")
        except OSError:
            pass
    lines = text.splitlines() or [""]
    print(f"{name}: error: " + "\n  ".join(lines), file=sys.stderr, flush=True)
    return exit_code
