"""Starting a run's processes, watching them, starting the dead again, and ending them in order.

``Supervisor`` has no opinion about what the processes do. It consumes their ends (one waiting
thread each), produces restarts, waits for the run to end, and is unblocked by an end or a signal.
All children are started from the main thread, whose end would kill them.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.errors import GO_BACK
from common.logs import LOGGER
from common.processes import child_environment, kill_descendants, signal_group
from common.roles import ERROR_FILE

TICK_S = 0.2
_log = logging.getLogger(LOGGER)
Start = Callable[[dict[str, str], int], subprocess.Popen[bytes]]  # (environment, open file for its output)


@dataclass(frozen=True)
class End:
    """How a child ended."""

    returncode: int
    own_error: str | None  # what it said itself, if it ended by an error of its own
    own_exit_code: int  # 2: nothing a restart could mend
    killed: bool  # by a signal, it or its worker

    @property
    def goes_back(self) -> bool:
        """It is to be started again as a matter of course, from a checkpoint that a rollback has named."""
        return self.own_error is not None and self.own_exit_code == GO_BACK

    def __str__(self) -> str:
        if self.own_error:
            return self.own_error
        return "killed by a signal" if self.killed else f"ended with code {self.returncode}"


@dataclass
class Child:
    """One supervised process."""

    name: str  # "redis", "broker", "learner", "generators"
    start: Start
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # Unix seconds
    ready: bool = False  # this incarnation has begun its real work
    output_from: int = 0  # bytes of its output file that earlier incarnations wrote
    restarts: int = 0
    restart_at: float | None = None  # monotonic seconds
    last_error: str | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


def verdict(child: Child, end: End, max_restarts: int) -> Literal["restart", "give up"]:
    """Whether a child that should be running is started again.

    Not if its own error says that nothing can mend it; nor if it never came to its work, at its
    first start or twice with the same error; nor if it died too often.
    """
    if end.own_error is not None and end.own_exit_code == 2:
        return "give up"
    if end.goes_back:
        return "restart"
    never_worked = not child.ready and not end.killed
    if never_worked and (child.restarts == 0 or child.last_error == str(end)):
        return "give up"
    return "give up" if child.restarts >= max_restarts else "restart"


@dataclass
class Outcome:
    """Why the watch ended."""

    child: str | None = None  # the child whose end it was
    end: End | None = None
    gave_up: bool = False


@dataclass
class Supervisor:
    logs: Path
    max_restarts: int
    children: dict[str, Child] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None  # a process was started
    on_restart: Callable[[str, str], None] = lambda name, what: None

    def __post_init__(self) -> None:
        self._ends: queue.SimpleQueue[tuple[Child, subprocess.Popen[bytes]] | None] = queue.SimpleQueue()
        self.interrupts = 0  # signals asking for the end

    # ------------------------------------------------------------ starting
    def add(self, name: str, start: Start) -> Child:
        """Start a child. Its output goes to ``logs/<name>.out``."""
        child = self.children[name] = Child(name, start)
        self._start(child)
        return child

    def adopt(self, name: str, process: subprocess.Popen[bytes], start: Start) -> Child:
        """Watch a process that already runs; ``start`` starts it again."""
        child = self.children[name] = Child(name, start, process, time.time(), ready=True)
        self._watch(child, process)
        return child

    def output(self, child: Child) -> Path:
        return self.logs / f"{child.name}.out"

    def _start(self, child: Child) -> None:
        self._error_file(child).unlink(missing_ok=True)
        env = child_environment({ERROR_FILE: str(self._error_file(child))}, restarted=child.restarts > 0)
        with open(self.output(child), "ab") as out:
            child.output_from = out.tell()
            child.started_at, child.ready, child.restart_at = time.time(), False, None
            child.process = child.start(env, out.fileno())
        self._watch(child, child.process)
        self.on_change()

    def _watch(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        def wait() -> None:
            process.wait()
            self._ends.put((child, process))

        threading.Thread(target=wait, name=f"wait-{child.name}", daemon=True).start()

    def _error_file(self, child: Child) -> Path:
        return self.logs / f"{child.name}.error"

    # ------------------------------------------------------------ watching
    def wake(self) -> None:
        """End the current wait early (safe in a signal handler)."""
        self._ends.put(None)

    def watch(self, tick: Callable[[], bool], finishes: Callable[[Child, End], bool]) -> Outcome:
        """Restart what dies, until ``tick`` returns False, a signal comes, or an end ends the run.

        tick: called about every 0.2 s. finishes: whether this end of a child is the end of the run.
        """
        while not self.interrupts and tick():
            child = self._next_end(TICK_S)
            if child is not None:
                end = self._how_it_ended(child)
                if finishes(child, end):
                    return Outcome(child.name, end)
                if verdict(child, end, self.max_restarts) == "give up":
                    return Outcome(child.name, end, gave_up=True)
                self._plan_restart(child, end)
            for due in self.children.values():
                if due.restart_at is not None and due.restart_at <= time.monotonic():
                    self._start(due)
        return Outcome()

    def _next_end(self, timeout_s: float) -> Child | None:
        try:
            item = self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if item is None or item[0].process is not item[1]:
            return None
        return item[0]

    def _plan_restart(self, child: Child, end: End) -> None:
        delay_s = min(0.25 * 2**child.restarts, 10.0) if child.restarts and not end.goes_back else 0.0
        child.restarts += not end.goes_back
        child.last_error = str(end)
        child.restart_at = time.monotonic() + delay_s
        count = "" if end.goes_back else f" ({child.restarts} of {self.max_restarts})"
        what = f"{str(end).splitlines()[0]}; started again{count}"
        _log.warning("%s: %s", child.name, what)
        self.on_restart(child.name, what)

    def _how_it_ended(self, child: Child) -> End:
        code = child.process.returncode if child.process else 0
        if own := read_own_error(self._error_file(child)):
            return End(code, *own, killed=False)
        last = self.last_lines(child, 200)
        # torch.distributed.run reports a killed worker as its own failure
        worker_killed = bool(re.search(r"Signal \d+ \(SIG\w+\) received by PID", last))
        killed = code < 0 or worker_killed
        error = None if killed or code == 0 else last_words(last)
        return End(code, error, code if code > 0 else 1, killed)

    def last_lines(self, child: Child, count: int) -> str:
        """The end of what the latest incarnation of a child printed."""
        try:
            with open(self.output(child), "rb") as f:
                f.seek(0, os.SEEK_END)
                f.seek(max(child.output_from, f.tell() - 64_000))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-count:])
        except OSError:
            return ""

    # ------------------------------------------------------------ ending
    def signal(self, number: int, *names: str) -> None:
        for name in names or tuple(self.children):
            child = self.children.get(name)
            if child is not None and child.process is not None:
                signal_group(child.process, number)

    def wait_for_end(self, names: list[str], deadline: float, tick: Callable[[], bool]) -> bool:
        """Wait until the named children have ended; False at the deadline (monotonic seconds) or on a signal."""
        before = self.interrupts
        while any(self.children[n].alive for n in names if n in self.children):
            if time.monotonic() >= deadline or self.interrupts > before:
                return False
            tick()
            self._next_end(min(TICK_S, max(0.0, deadline - time.monotonic())))
        return True

    def kill_all(self) -> None:
        """Every descendant, at once."""
        self.signal(signal.SIGKILL)
        kill_descendants()
        for child in self.children.values():
            if child.process is not None:
                child.process.wait()

    def pids(self) -> dict[str, int]:
        return {n: c.process.pid for n, c in self.children.items() if c.alive and c.process is not None}


def read_own_error(path: Path) -> tuple[str, int] | None:
    """``(error, exit code)`` that a role left behind (see ``roles.run_role``), or None."""
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
        return str(own["error"]), int(own["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_words(output: str) -> str:
    """The line of a program's output that says why it failed: of the last traceback, else the last."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        # torch.distributed.run speaks after its worker; the worker's words are before
        if "torch.distributed.elastic" in line or "torch/distributed/elastic" in line:
            lines = lines[:i] or lines
            break
    return lines[-1].strip() if lines else "it said nothing"
