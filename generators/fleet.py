"""This host's generators: one process each, started again when they die, ended with this one.

How many there are to be is said by ``generators.count``, and later by ``launch.py scale``; who is to go
finishes its leases first.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from signal import SIGTERM

from common.errors import ControlError, LeewayError
from common.limits import asked_size, drain_key, drains
from common.preflight import staging_faults
from common.processes import spawn
from common.roles import Role
from common.supervise import Child, End, Start, Supervisor


def run_fleet(role: Role, argv: list[str], *, module: str = "generators.loop") -> None:
    """Run this fleet's generators until told to stop, or until every one has failed.

    Consumes the ends of its children and the registry (to know who has begun its work), the size the
    fleet is to have, who is to drain. A generator that cannot start is not tried again; one that worked
    and died is, up to ``run.max_restarts``.

    Args:
        argv: the arguments of this process; each child gets them with a name of its own.

    Raises:
        LeewayError: there is no room for a staged version of each (others may free some); or every generator
            failed: its text and exit code are those of the last.
    """
    fleet = Fleet(role, [sys.executable, "-m", module, *argv])
    try:
        failure = fleet.run()
    finally:
        fleet.end()
    if failure is not None:
        error = LeewayError(failure.own_error or str(failure))
        error.exit_code = failure.own_exit_code
        raise error


class Fleet:
    def __init__(self, role: Role, command: list[str]) -> None:
        self._role, self._command = role, command
        self._supervisor = Supervisor(role.run_dir / "logs", role.config.run.max_restarts)
        self._left: list[str] = []  # the generators that run, or are started again
        self._num_begun = 0
        self._asked: tuple[int, float] = (-1, 0.0)  # the size, and when it was asked for
        self._num_lost = 0  # since then: given up, or drained by name; not replaced
        self._surplus: set[str] = set()  # drain because the fleet shrank, or before its size was asked for

    def run(self) -> End | None:
        """Until told to stop or all have ended by themselves (None), or until the last has failed: how."""
        self._role.control.register("fleet", self._role.name)
        self._refuse_too_many()
        self._adapt()
        while True:
            outcome = self._supervisor.watch(self._tick, finishes=lambda _, end: end.returncode == 0)
            if outcome.child is None:
                return None
            self._left.remove(outcome.child)
            del self._supervisor.children[outcome.child]
            if outcome.gave_up:
                self._num_lost += 1
                if not self._left and self._asked[0] > 0:
                    return outcome.end
                self._role.log.error("%s is given up: %s", outcome.child, outcome.end)
            elif outcome.child not in self._surplus:
                self._num_lost += 1
                if not self._left and not drains(self._role.control.limit, outcome.child):
                    return None

    def end(self) -> None:
        """Ask all to end, and kill who has not within the time that this process itself has, or nearly."""
        patience_s = 0.8 * self._role.config.run.stop_timeout_s
        self._supervisor.signal(SIGTERM)
        if not self._supervisor.wait_for_end(self._left, time.monotonic() + patience_s, tick=lambda: True):
            self._role.log.warning("generators still there after %.0f s are killed", patience_s)
        self._supervisor.kill_all()

    def _tick(self) -> bool:
        for child in self._supervisor.children.values():
            child.ready = child.ready or self._works(child)
        if not self._role.stop.is_set():
            self._adapt()
        return not self._role.stop.is_set()

    def _wanted(self) -> tuple[int, float]:
        """How many are to be here, and when that was asked for (0.0: by the config)."""
        return asked_size(self._role.control.limit, self._role.name) or (self._role.config.generators.count, 0.0)

    def _refuse_too_many(self) -> None:
        """Unless there is room for a staged version of each that is wanted now, which may be fewer than configured."""
        config, (count, _) = self._role.config, self._wanted()
        generators = config.generators.model_copy(update={"count": count})
        for fault in staging_faults(config.model_copy(update={"generators": generators})):
            raise LeewayError(fault)

    def _adapt(self) -> None:
        """Start who is missing; have the youngest drain where there are too many."""
        control = self._role.control
        asked = self._wanted()
        going = [name for name in self._left if drains(control.limit, name)]
        if asked != self._asked:
            self._asked, self._num_lost = asked, 0
            self._surplus.update(going)
            self._role.log.info("%d generators are wanted here", asked[0])
        wanted = asked[0]
        staying = [name for name in self._left if name not in going]
        going_by_name = [name for name in going if name not in self._surplus]
        for name in staying[wanted:]:
            with contextlib.suppress(ControlError):  # Redis does not answer: later
                control.set_limit(drain_key(name), True, self._role.name)
                self._surplus.add(name)
        for _ in range(wanted - self._num_lost - len(staying) - len(going_by_name)):
            self._begin()
        control.update(state=f"{len(self._left)} of {wanted} generators")

    def _begin(self) -> None:
        """One more, under a name that no drained one had."""
        while drains(self._role.control.limit, name := f"{self._role.name}-{self._num_begun}"):
            self._num_begun += 1
        self._num_begun += 1
        self._left.append(name)
        self._supervisor.add(name, _start([*self._command, "--name", name]))

    def _works(self, child: Child) -> bool:
        """The registry says that this very process has begun its work."""
        entry = self._role.control.entry(child.name)
        return (
            entry is not None
            and child.process is not None
            and entry.pid == child.process.pid
            and entry.fields.get("ready") == "1"
        )


def _start(argv: list[str]) -> Start:
    """Children write to our stderr and keep log files of their own; ``spawn`` ends them with us."""

    def start(env: dict[str, str], _out: int) -> subprocess.Popen[bytes]:
        return spawn(argv, env=env)

    return start
