"""This host's generators: one process each, started again when they die, ended with this one."""

from __future__ import annotations

import subprocess
import sys
import time
from signal import SIGTERM

from common.errors import LeewayError
from common.processes import spawn
from common.roles import Role
from common.supervise import Child, End, Start, Supervisor


def run_fleet(role: Role, argv: list[str], *, module: str = "generators.loop") -> None:
    """Run ``generators.count`` generators until told to stop, or until none is left.

    Consumes the ends of its children and the registry (to know who has begun its work). A generator
    that cannot start is not tried again; one that worked and died is, up to ``run.max_restarts``.

    Args:
        argv: the arguments of this process; each child gets them with a name of its own.

    Raises:
        LeewayError: every generator failed; its text and exit code are those of the last.
    """
    count = role.config.generators.count
    names = [f"{role.name}-{k}" for k in range(count)]
    fleet = Supervisor(role.run_dir / "logs", role.config.run.max_restarts)
    if not names:
        role.log.info("generators.count=0: no generator to start here")
    try:
        for name in names:
            fleet.add(name, _start([sys.executable, "-m", module, *argv, "--name", name]))
        failure = _watch(role, fleet, set(names))
    finally:
        _end(role, fleet, names)
    if failure is not None:
        error = LeewayError(failure.own_error or str(failure))
        error.exit_code = failure.own_exit_code
        raise error


def _start(argv: list[str]) -> Start:
    """Children write to our stderr and keep log files of their own; ``spawn`` ends them with us."""

    def start(env: dict[str, str], _out: int) -> subprocess.Popen[bytes]:
        return spawn(argv, env=env)

    return start


def _watch(role: Role, fleet: Supervisor, left: set[str]) -> End | None:
    """Until told to stop (None), or until no child is left: how the last one failed, if it did."""

    def tick() -> bool:
        for child in fleet.children.values():
            child.ready = child.ready or _works(role, child)
        return not role.stop.is_set()

    failure = None
    while left:
        outcome = fleet.watch(tick, finishes=lambda _, end: end.returncode == 0)
        if outcome.child is None:
            return None
        left.discard(outcome.child)
        if outcome.gave_up:
            failure = outcome.end
            if left:
                role.log.error("%s is given up: %s", outcome.child, outcome.end)
    return failure


def _works(role: Role, child: Child) -> bool:
    """The registry says that this very process has begun its work."""
    entry = role.control.entry(child.name)
    return (
        entry is not None
        and child.process is not None
        and entry.pid == child.process.pid
        and entry.fields.get("ready") == "1"
    )


def _end(role: Role, fleet: Supervisor, names: list[str]) -> None:
    """Ask all to end, and kill who has not within the time that this process itself has, or nearly."""
    fleet.signal(SIGTERM)
    deadline = time.monotonic() + 0.8 * role.config.run.stop_timeout_s
    if not fleet.wait_for_end(names, deadline, tick=lambda: True):
        role.log.warning("generators still there after %.0f s are killed", 0.8 * role.config.run.stop_timeout_s)
    fleet.kill_all()
