"""The receiving end of a transfer, in a worker of the engine (no vLLM here).

A thread receives a whole version into one buffer, which is reused, while the engine goes on sampling;
another one computes the digest of each tensor beside it. What came of it is posted. Until then, and if
anything fails, the engine's weights are untouched.

`weights.staging` says where the buffer lies: in host memory (``host``), where the workers of a
tensor-parallel engine share one, a file in memory: the first receives for all, the others look into it
when they load; or in each worker's device memory (``device``). ``none`` has no buffer: ``arriving.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.buffers import Buffer, Watermark, check_digests, with_digests
from common.errors import WeightError
from common.failpoints import failpoint
from common.transfer import Group, Ticket
from common.weights import Manifest
from generators.receiving import Layout, Line, Shapes, reason_of, receive_bucket, receive_digests

Post = Callable[..., None]  # post(op, **fields): an event of WORKER_OPS


class Staging:
    """One worker's buffer for the next version. Methods are for the worker's main thread."""

    def __init__(
        self, worker: int, shared: str = "", *, device: torch.device | None = None, model: Shapes | None = None
    ) -> None:
        """
        Args:
            shared: name of the file in which the engine's workers share the bytes; empty: there is one worker.
            device: whose memory holds the bytes, of each worker its own; None: host memory.
            model: see ``Layout``.
        """
        self._worker = worker
        self._file = Path(shared) if shared and device is None else None
        self._buffer = Buffer(self._file, device or "cpu")
        self._on_device = device is not None
        self.layout = Layout(model)
        self._line = Line()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards what follows against the receiving thread
        self._number = -1  # of the newest transfer
        self._wanted: tuple[int, Manifest]  # announced last; of workers that do not receive
        self._staged: int | None = None  # version that lies complete and checked in the buffer

    def begin(
        self,
        *,
        number: int,
        version: int,
        manifest: bytes,
        ticket: list[Any],
        rank: int,
        world_size: int,
        timeout_s: float,
        post: Post,
    ) -> None:
        """Start to receive; returns at once. ``post`` is called with ``staged`` or ``failed``.

        ticket: the fields of a ``Ticket``, as they come through vLLM's call.

        A transfer that still runs is given up (the learner has closed its end).

        Raises:
            WeightError: see ``Layout.accept``; or it does not fit into the memory that is free.
        """
        wanted = self.layout.accept(manifest)
        before = self._thread
        with self._lock:
            self._staged, self._number = None, number
        if self._worker > 0 and self._file is not None:
            self.layout.keep(wanted)
            self._wanted = (version, wanted)
            return
        self._buffer.refuse_what_does_not_fit(wanted)
        self._mark(None)

        def receive() -> None:
            start = time.perf_counter()
            group: Group | None = None
            well, where = False, Ticket(*ticket)
            try:
                _wait_for(before, timeout_s)
                group = self._line.join(where, rank=rank + self._worker, world_size=world_size, timeout_s=timeout_s)
                digest = self._receive(group, wanted, timeout_s)
                self._complete(number, version, wanted)
                failpoint("staging.staged")
                seconds, well = time.perf_counter() - start, True
                self._line.end(where, group, well=True)
                post("staged", number=number, worker=self._worker, digest=digest, receive_s=seconds)
            except Exception as e:  # said before the group closes, which the learner sees at once
                post("failed", number=number, worker=self._worker, reason=reason_of(e))
            finally:
                if group is not None and not well:
                    self._line.end(where, group, well=False)

        self._thread = threading.Thread(target=receive, name=f"weights-{number}", daemon=True)
        self._thread.start()

    def _receive(self, group: Group, manifest: Manifest, timeout_s: float) -> int:
        """All buckets, and the digests that were sent; returns the version's own."""
        self._buffer.prepare(manifest)
        through_host = self._on_device and not group.on_device
        through = torch.empty(manifest.bucket(0).stop if through_host else 0, dtype=torch.uint8)
        filled = Watermark()
        following = _Following(self._buffer, filled, timeout_s)
        try:
            for index in range(manifest.num_buckets):
                bucket = self._buffer.bucket(index)
                host = through[: len(bucket)] if through_host else bucket
                receive_bucket(group, host, index, manifest)
                if through_host:
                    bucket.copy_(host)
                filled.raise_to(manifest.bucket(index).stop)
        except BaseException:
            filled.fail("torn")
            raise
        sealed = following.result()
        check_digests(sealed, receive_digests(group, manifest))
        return sealed.digest

    def _complete(self, number: int, version: int, manifest: Manifest) -> None:
        with self._lock:
            if self._number != number:
                raise WeightError("a newer transfer took its place")
            self._staged = version
            self.layout.keep(manifest)
        self._mark(version)

    def check(self, version: int) -> None:
        """Raises WeightError unless ``version`` lies complete in the buffer."""
        if self._worker > 0 and self._file is not None:
            self._look(version)
        with self._lock:
            if self._staged != version:
                raise WeightError(f"version {version} is not staged here (but {self._staged})")

    def take(self, version: int) -> Buffer:
        """The complete ``version``; once. It stands until the next ``begin``."""
        self.check(version)
        with self._lock:
            self._staged = None
        return self._buffer

    def _mark(self, version: int | None) -> None:
        """Tell the other workers which version lies complete in the file."""
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_text("" if version is None else str(version))
            fresh.replace(self._file.with_suffix(".version"))

    def _look(self, version: int) -> None:
        """Another worker than the first: whether that one has received what was announced to all."""
        assert self._file is not None
        announced, manifest = self._wanted
        there = self._file.with_suffix(".version").read_text()
        if announced == version and there == str(version):
            self._buffer.prepare(manifest)
            with self._lock:
                self._staged = version


class _Following(threading.Thread):
    """Computes the digest of each tensor as soon as its last byte is there, beside the receiving."""

    def __init__(self, buffer: Buffer, filled: Watermark, timeout_s: float) -> None:
        super().__init__(name="digests", daemon=True)
        self._buffer, self._filled, self._timeout_s = buffer, filled, timeout_s
        self._sealed: Manifest | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._sealed = with_digests(self._buffer, self._filled, 2 * self._timeout_s)
        except Exception as e:
            self._sealed = e

    def result(self) -> Manifest:
        """After the last byte. Raises WeightError, or what the digests met with."""
        self.join(self._timeout_s)
        if isinstance(self._sealed, Exception):
            raise self._sealed
        if self._sealed is None:
            raise WeightError(f"no digests of what was received within {self._timeout_s:g} s")
        return self._sealed


def _wait_for(thread: threading.Thread | None, timeout_s: float) -> None:
    """The transfer before this one: its group is closed, so it ends soon; both use one buffer."""
    if thread is not None:
        thread.join(timeout_s)
        if thread.is_alive():
            raise WeightError(f"the transfer before this one has not ended within {timeout_s:g} s")
