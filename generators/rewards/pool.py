"""One spawned, killable process for reward functions that may hang, crash or block.

A function that loops in C code cannot be interrupted from within; the only sure limit is to kill
its process. Calls are answered in order, so the time of the call at the head is the time since the
answer before it. When the limit is reached, the process (with its process group) is killed, the
call at the head becomes ``reward_timeout``, and the others go to a new process. The process is
spawned by ``exec`` (never a fork that goes on with this process's locks) and dies with us.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import Any

import msgpack

from common.errors import ConfigError, DeadlineError, LeewayError
from common.processes import child_environment
from generators.rewards import ERROR, INVALID, TIMEOUT, Score, custom

_MAX_LOGGED = 20  # different faults that are logged, each once


class RewardProcess:
    """Consumes calls, produces scores. Used from one asyncio loop, in the main thread."""

    def __init__(
        self, target: str, name: str, *, timeout_s: float, start_timeout_s: float, log: logging.Logger
    ) -> None:
        """Starts the process; ``ready`` says whether the function could be loaded.

        Args:
            target: a Python file or the name of a module.
            name: the function in it.
            timeout_s: seconds one call may take.
            start_timeout_s: seconds loading the file may take.
        """
        self._target, self._name = target, name
        self._timeout_s, self._start_timeout_s, self._log = timeout_s, start_timeout_s, log
        self._calls: deque[tuple[bytes, asyncio.Future[Score]]] = deque()  # the first is the one that runs
        self._unsent: list[bytes] = []  # the last of `_calls`
        self._loop = asyncio.get_running_loop()
        self._error: LeewayError | None = None
        self._closing = False
        self._flushing = False
        self._logged: set[str] = set()
        self.pid = 0
        self._start()

    async def ready(self) -> None:
        """Raises ConfigError if the function cannot be loaded, DeadlineError if loading takes too long."""
        await asyncio.shield(self._is_ready)

    def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None
    ) -> asyncio.Future[Score]:
        """The score, or the fault of this one call. The future raises only if the process cannot be restarted."""
        future: asyncio.Future[Score] = self._loop.create_future()
        if self._error is not None or self._closing:
            future.set_exception(self._error or LeewayError("the reward process is closed"))
            return future
        data = msgpack.packb([data_source, solution_str, ground_truth, extra_info])
        self._calls.append((data, future))
        self._unsent.append(data)
        if self._up and not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)  # one write for all calls of this turn of the loop
        return future

    def close(self) -> None:
        self._closing = True
        self._timer.cancel()
        self._kill()
        for _, future in self._calls:
            future.cancel()
        self._calls.clear()
        if not self._is_ready.done():
            self._is_ready.cancel()

    # ------------------------------------------------------------ life of the process
    def _start(self) -> None:
        self._up = False
        self._unsent = [data for data, _ in self._calls]
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 26)
        self._is_ready: asyncio.Future[None] = self._loop.create_future()
        self._is_ready.add_done_callback(lambda f: f.cancelled() or f.exception())  # it may have no waiter
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "generators.rewards.custom", str(theirs.fileno()), self._target, self._name],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                env=child_environment(),
            )  # fmt: skip
        self.pid = self._process.pid
        ours.setblocking(False)
        self._socket, self._outgoing = ours, bytearray()
        self._loop.add_reader(ours, self._readable)
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._start_timeout_s, self._look_at_clock)

    def _kill(self) -> None:
        """End the process and what it started."""
        if self._socket.fileno() < 0:
            return  # done before
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _look_at_clock(self) -> None:
        limit_s = self._timeout_s if self._up else self._start_timeout_s
        left_s = self._since + limit_s - self._loop.time()
        if (self._up and not self._calls) or left_s > 0:
            self._timer = self._loop.call_later(left_s if left_s > 0 else limit_s, self._look_at_clock)
            return
        self._ended(Score(None, fault=TIMEOUT, detail=f"no answer within {limit_s:g} s"))

    def _ended(self, head: Score | None = None) -> None:
        """The process is gone or has to go: settle the call at the head, start another for the rest."""
        self._timer.cancel()
        self._kill()
        if self._error is not None:
            return
        if not self._up:
            what = f"{self._name} of {self._target} to load"
            late = DeadlineError(what, self._start_timeout_s, "what does the file do when imported?")
            died = ConfigError(f"{self._target}: the process ended while loading it ({self._how_it_ended()})")
            self._fail(late if head else died)
            return
        if head is None:
            head = Score(None, fault=ERROR, detail=f"the process ended ({self._how_it_ended()})")
        if len(self._calls) > len(self._unsent):
            self._settle(head)
        self._start()

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _fail(self, error: LeewayError) -> None:
        self._error = error
        if not self._is_ready.done():
            self._is_ready.set_exception(error)
        for _, future in self._calls:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # ------------------------------------------------------------ traffic
    def _flush(self) -> None:
        self._flushing = False
        if not self._up or not self._unsent:
            return
        if len(self._unsent) == len(self._calls):  # it was idle: the clock of the head starts
            self._since = self._loop.time()
            self._timer.cancel()
            self._timer = self._loop.call_later(self._timeout_s, self._look_at_clock)
        self._outgoing += b"".join(self._unsent)
        self._unsent.clear()
        self._write()

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing[: 1 << 18])]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            pass  # it ended: the reading side sees it
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        self._unpacker.feed(data)
        for answer in self._unpacker:
            self._read_answer(answer)

    def _read_answer(self, answer: list[Any]) -> None:
        self._since = self._loop.time()
        if answer[0] == custom.READY:
            self._up = True
            self._is_ready.set_result(None)
            self._flush()
        elif answer[0] == custom.FAULT:
            self._fail(ConfigError(answer[1]))
        elif answer[0] == custom.OK:
            self._settle(Score(answer[1], answer[2]))
        else:
            self._settle(Score(None, fault=ERROR if answer[0] == custom.RAISED else INVALID, detail=answer[1]))

    def _settle(self, score: Score) -> None:
        """The call at the head has its score."""
        _, future = self._calls.popleft()
        if not future.done():
            future.set_result(score)
        if score.fault and score.detail not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(score.detail)
            self._log.warning("reward function %s: %s: %s", self._name, score.fault, score.detail)
