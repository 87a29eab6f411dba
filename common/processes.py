"""Child processes that never outlive their parent.

A child is killed by the kernel as soon as the *thread* that started it ends: start children from
the main thread, or from one that lives as long as they shall.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing)."""
    if _LIBC is None:
        return
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


def wants_to_die_with_parent() -> bool:
    """Whether the parent asked for it by ``LEEWAY_PDEATHSIG=1``."""
    return os.environ.get("LEEWAY_PDEATHSIG") == "1"


def child_environment(extra: dict[str, str] | None = None, *, restarted: bool = False) -> dict[str, str]:
    """This process's environment, fit for a child.

    One OpenMP thread where cores are few (several spin-wait beside any other busy process), with
    bytecode (without it each start compiles its imports anew), and no failpoints after a restart.
    """
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if (os.cpu_count() or 1) <= 8:
        env.setdefault("OMP_NUM_THREADS", "1")
    if restarted:
        env.pop("LEEWAY_FAILPOINT", None)
    return {**env, "LEEWAY_PDEATHSIG": "1", **(extra or {})}


def spawn(
    argv: list[str],
    *,
    env: dict[str, str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``argv`` in a session of its own (a terminal's Ctrl-C does not reach it), bound to this process."""
    return subprocess.Popen(
        argv,
        env=child_environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to ``process`` and to its process group, if they still exist."""
    if process.poll() is None or number == signal.SIGKILL:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def children(pid: int) -> list[int]:
    """The direct children of ``pid`` (Linux; elsewhere none)."""
    return _children_by_parent().get(pid, [])


def descendants(pid: int | None = None) -> list[int]:
    """All processes below ``pid`` (default: this process), nearest first."""
    by_parent = _children_by_parent()
    found, level = [], [os.getpid() if pid is None else pid]
    while level:
        level = [c for p in level for c in by_parent.get(p, [])]
        found += level
    return found


def _children_by_parent() -> dict[int, list[int]]:
    by_parent: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid …"; the name may contain anything, even brackets
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
        by_parent.setdefault(parent, []).append(int(entry.parent.name))
    return by_parent


def terminate_workers(agent: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the workers of a torch.distributed.run agent, which ends well if they do; to it if it has none."""
    workers = children(agent.pid)
    for pid in workers:
        try:
            os.kill(pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            pass
    if not workers:
        signal_group(agent, signal.SIGTERM)


def kill_descendants() -> None:
    """SIGKILL to every process below this one."""
    for pid in descendants():
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
