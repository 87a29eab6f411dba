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
