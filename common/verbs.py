"""The verbs that talk to a run: status, why, pause, resume, stop, drain, scale, set."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common import wire
from common.control import Control, Desired, Entry
from common.errors import ConfigError, ControlError, DeadlineError, LeewayError
from common.limits import asked_changes, drain_key, read_changes, size_key
from common.local_run import RUN_FILE
from common.roles import read_config
from common.sockets import Dealer
from common.summary import Summary

_CONNECT_S = 3.0
_BROKER_S = 3.0
_PATIENCE_S = 10.0  # with a Redis that is slow or starts again


@dataclass(frozen=True)
class Place:
    """Where a run is."""

    redis_url: str
    run_id: str
    folder: Path | None = None


def find_run(folder: str | None, redis_url: str | None, run_id: str | None) -> Place:
    """By folder, by Redis URL and run id, else the newest run under ``runs/``.

    Raises:
        ConfigError: there is no such run.
    """
    redis_url = redis_url or (os.environ.get("LEEWAY_REDIS_URL") if run_id else None)
    if redis_url and run_id:
        return Place(redis_url, run_id)
    if redis_url or run_id:
        raise ConfigError("give --redis-url and --run-id together, or the run's folder")
    path = Path(folder) if folder else _newest()
    try:
        content = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        return Place(content["redis_url"], content["run_id"], path)
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"{path}: no run here ({RUN_FILE} is missing or cannot be read)") from e


def _newest() -> Path:
    found = sorted(Path("runs").glob(f"*/{RUN_FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError("no run under runs/; give the run's folder, or --redis-url and --run-id")
    return found[-1].parent


def set_desired(place: Place, state: Desired) -> int:
    """Raises ControlError when the run's Redis does not answer."""
    with _running(place) as control:
        control.set_desired(state, _who())
    print(f"run {place.run_id}: {state}")
    return 0


def set_limits(place: Place, items: list[str]) -> int:
    """Change what can be changed of a run that goes on; all of it or nothing.

    Raises:
        ConfigError: what cannot be set, with the reason. ControlError: no run there.
    """
    asked_changes(items)
    with _running(place) as control:
        config, _ = read_config(control.wait_for_config(deadline_s=_CONNECT_S))
        standing = control.limits()
        changes = read_changes(items, config, standing)
        for key, value in changes.items():
            control.set_limit(key, value, _who())
    for key, value in changes.items():
        print(f"run {place.run_id}: {key} = {value}")
    return 0


def scale(place: Place, size: int, fleet: str | None) -> int:
    """Have a fleet (the only one, if none is named) run ``size`` generators; the youngest drain where there are more.

    Raises:
        ConfigError: no such fleet, or not said which. ControlError: no run there.
    """
    with _running(place) as control:
        name = _one_of("fleet", fleet, [e.name for e in control.entries("fleet")], "start one: launch.py generators")
        control.set_limit(size_key(name), [size, time.time()], _who())  # the same again is a request too
    print(f"run {place.run_id}: {name} is to have {size} generators")
    return 0


def drain(place: Place, generator: str) -> int:
    """Have one generator finish its leases and end; its fleet starts no other in its place.

    Raises:
        ConfigError: no such generator. ControlError: no run there.
    """
    with _running(place) as control:
        name = _one_of("generator", generator, [e.name for e in control.entries("generator")], "see launch.py status")
        control.set_limit(drain_key(name), True, _who())
    print(f"run {place.run_id}: {name} drains")
    return 0


def _one_of(kind: str, asked: str | None, there: list[str], remedy: str) -> str:
    if asked in there:
        return asked
    if asked is None and len(there) == 1:
        return there[0]
    names = ", ".join(sorted(there)) or f"none; {remedy}"
    wrong = f"--{kind}: which one?" if asked is None else f"--{kind} {asked}: no such {kind}."
    raise ConfigError(f"{wrong} There are: {names}")


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def status(place: Place, *, as_json: bool) -> int:
    """Each process, and the broker's counts. Exit code 1 if nothing of the run is there."""
    try:
        control = _connect(place)
    except ControlError as e:
        return _not_running(place, str(e), as_json)
    try:
        entries, desired = control.entries(), control.desired()
    finally:
        control.close()
    counts, trouble = _broker_status(entries)
    if as_json:
        print(json.dumps({
            "run_id": place.run_id, "desired": desired, "processes": [_plain(e) for e in entries],
            "broker": counts, **({"trouble": trouble} if trouble else {}),
        }))  # fmt: skip
    else:
        _print_status(place, desired, entries, counts, trouble)
    return 0 if entries else 1


def why(place: Place) -> int:
    """Who waits for whom, since when, and what happened last."""
    control = _connect(place)
    try:
        entries, events = control.entries(), control.events()
        desired = control.desired()
    finally:
        control.close()
    print(f"run {place.run_id}: {desired}")
    for e in entries:
        since = float(e.fields.get("state_since", "0") or 0)
        print(f"  {e.name}: {e.state}" + (f", for {_ago(since)}" if since else ""))
    counts, trouble = _broker_status(entries)
    for line in _waits(counts):
        print(f"  {line}")
    if trouble:
        print(f"  {trouble}")
    if events:
        print("latest events:")
    for at, who, what in events:
        print(f"  {time.strftime('%H:%M:%S', time.localtime(at))} {who}: {what}")
    return 0


@contextlib.contextmanager
def _running(place: Place) -> Iterator[Control]:
    """The control of a run that has processes. Raises ControlError if it has none."""
    control = _connect(place)
    try:
        if not control.entries():
            raise ControlError(f"run {place.run_id}: no process of it is running")
        yield control
    finally:
        control.close()


def _connect(place: Place) -> Control:
    """Raises ControlError: no Redis there; it says so if that is because the run has ended."""
    try:
        control = Control(place.redis_url, place.run_id, deadline_s=_CONNECT_S, patience_s=_PATIENCE_S)
        control.refresh()
    except ControlError as e:
        summary = Summary.read(place.folder) if place.folder else None
        if summary is not None and summary.ended:
            raise ControlError(f"run {place.run_id} has ended ({summary.ended}); start it again to go on") from e
        raise
    return control


def _not_running(place: Place, reason: str, as_json: bool) -> int:
    summary = Summary.read(place.folder) if place.folder else None
    if as_json:
        print(json.dumps({"run_id": place.run_id, "desired": "stopped", "processes": [], "trouble": reason}))
        return 1
    print(f"run {place.run_id} is not running ({reason})")
    if summary is not None and place.folder is not None:
        print(summary.paragraph(place.folder))
    return 1


def _broker_status(entries: list[Entry]) -> tuple[dict[str, Any], str | None]:
    """What the broker says of itself, or why it says nothing."""
    address = next((e.address for e in entries if e.role == "broker" and e.address), None)
    if address is None:
        return {}, "no broker in the registry"
    try:
        return ask_broker(address), None
    except LeewayError as e:
        return {}, str(e)


def ask_broker(address: str) -> dict[str, Any]:
    """The broker's ``status``.

    Raises:
        DeadlineError: it does not answer. WireError: its answer cannot be read.
    """
    dealer = Dealer(address, f"status-{os.getpid()}-{time.time_ns()}".encode())
    try:
        dealer.send(wire.encode("status", id=1))
        end = time.monotonic() + _BROKER_S
        while (left := end - time.monotonic()) > 0:
            frames = dealer.receive(left)
            if frames is None:
                break
            op, fields, _ = wire.decode(frames, wire.LEARNER_OPS)
            if op == "status_is":
                return dict(fields["status"])
        raise DeadlineError(f"the broker at {address}", _BROKER_S)
    finally:
        dealer.close()


def _print_status(
    place: Place, desired: str, entries: list[Entry], counts: dict[str, Any], trouble: str | None
) -> None:
    console = Console()
    console.print(f"run {place.run_id}: {desired}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for heading in ("role", "name", "pid", "host", "version", "state"):
        table.add_column(heading, no_wrap=heading != "state")
    for e in sorted(entries, key=lambda e: (e.role, e.name)):
        table.add_row(e.role, e.name, str(e.pid), e.host, "–" if e.version < 0 else str(e.version), e.state)
    console.print(table)
    for line in [*_counts(counts), *_waits(counts), *([trouble] if trouble else [])]:
        console.print(line, highlight=False, markup=False)


def _counts(counts: dict[str, Any]) -> list[str]:
    """The broker's plain figures on one line, each map on one of its own; not the metrics."""
    plain = [f"{k} {v}" for k, v in counts.items() if isinstance(v, (int, float)) and "/" not in k]
    maps = [(k, v) for k, v in counts.items() if isinstance(v, dict) and v]
    return [", ".join(plain), *(f"{k}: {', '.join(f'{a} {b}' for a, b in v.items())}" for k, v in maps)]


def _waits(counts: dict[str, Any]) -> list[str]:
    """Lines about waiting that the broker's status has."""
    return [str(line) for line in counts.get("waits", ())]


def _plain(e: Entry) -> dict[str, Any]:
    return {
        "role": e.role, "name": e.name, "pid": e.pid, "host": e.host, "address": e.address, "state": e.state,
        "version": e.version, **e.fields,
    }  # fmt: skip


def _ago(since: float) -> str:
    return f"{max(0.0, time.time() - since):.1f} s"
