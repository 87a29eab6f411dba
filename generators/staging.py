"""The receiving end of a transfer, in a worker of the engine (no vLLM here).

A thread receives a whole version into one host buffer, which is reused, while the engine goes on
sampling; it checks every tensor's digest and posts what came of it. Until then, and if anything
fails, the engine's weights are untouched.

The workers of a tensor-parallel engine share one buffer, a file in memory: the first receives for
all, the others look into it when they load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import LeewayError, WeightError
from common.failpoints import failpoint
from common.transfer import Group, Ticket, first_line, join_group
from common.weights import HostBuffer, Manifest, decode_manifest

Post = Callable[..., None]  # post(op, **fields): an event of WORKER_OPS


class Staging:
    """One worker's buffer for the next version. Methods are for the worker's main thread."""

    def __init__(self, worker: int, shared: str = "") -> None:
        """shared: name of the file in which the engine's workers share the bytes; empty: there is one worker."""
        self._worker = worker
        self._file = Path(shared) if shared else None
        self._buffer = HostBuffer(self._file)
        self._layout: Manifest | None = None  # of the first version; all later ones must have it
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
            WeightError: the manifest cannot be read or is that of another model.
        """
        wanted = decode_manifest(manifest)
        self._refuse_other_layout(wanted)
        before = self._thread
        with self._lock:
            self._staged, self._number = None, number
        if self._worker > 0:
            self._layout, self._wanted = self._layout or wanted, (version, wanted)
            return
        self._mark(None)

        def receive() -> None:
            start = time.perf_counter()
            group: Group | None = None
            try:
                _wait_for(before, timeout_s)
                group = join_group(
                    Ticket(*ticket), rank=rank + self._worker, world_size=world_size, timeout_s=timeout_s
                )
                self._receive(group, wanted)
                self._complete(number, version, wanted)
                failpoint("staging.staged")
                seconds = time.perf_counter() - start
                post("staged", number=number, worker=self._worker, digest=wanted.digest, receive_s=seconds)
            except Exception as e:  # said before the group closes, which the learner sees at once
                post("failed", number=number, worker=self._worker, reason=_reason(e))
            finally:
                if group is not None:
                    group.close()

        self._thread = threading.Thread(target=receive, name=f"weights-{number}", daemon=True)
        self._thread.start()

    def _receive(self, group: Group, manifest: Manifest) -> None:
        """All buckets; each tensor is checked as soon as its last byte is there."""
        self._buffer.prepare(manifest)
        unchecked = list(zip(manifest.entries, manifest.digests, strict=True))[::-1]
        for index in range(manifest.num_buckets):
            failpoint("staging.bucket")
            try:
                group.receive(self._buffer.bucket(index))
            except (RuntimeError, WeightError) as e:
                raise WeightError(f"bucket {index} of {manifest.num_buckets}: {first_line(e)}") from None
            there = manifest.bucket(index).stop
            while unchecked and unchecked[-1][0].end <= there:
                entry, digest = unchecked.pop()
                if self._buffer.digest(entry) != digest:
                    raise WeightError(f"tensor {entry.name}: the bytes received are not those sent (digest differs)")

    def _complete(self, number: int, version: int, manifest: Manifest) -> None:
        with self._lock:
            if self._number != number:
                raise WeightError("a newer transfer took its place")
            self._staged = version
            self._layout = self._layout or manifest
        self._mark(version)

    def check(self, version: int) -> None:
        """Raises WeightError unless ``version`` lies complete in the buffer."""
        if self._worker > 0:
            self._look(version)
        with self._lock:
            if self._staged != version:
                raise WeightError(f"version {version} is not staged here (but {self._staged})")

    def take(self, version: int) -> HostBuffer:
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

    def _refuse_other_layout(self, wanted: Manifest) -> None:
        if len(wanted.digests) != len(wanted.entries):
            raise WeightError("the manifest has no digests")
        if self._layout is None or self._layout.entries == wanted.entries:
            return
        mine: dict[str, Any] = {e.name: (e.dtype, e.shape) for e in self._layout.entries}
        new: dict[str, Any] = {e.name: (e.dtype, e.shape) for e in wanted.entries}
        for name in [*mine, *new]:
            if mine.get(name) != new.get(name):
                raise WeightError(f"tensor {name}: {_text(new.get(name))} is sent, {_text(mine.get(name))} was before")
        raise WeightError("the tensors come in another order than before")


def _wait_for(thread: threading.Thread | None, timeout_s: float) -> None:
    """The transfer before this one: its group is closed, so it ends soon; both use one buffer."""
    if thread is not None:
        thread.join(timeout_s)
        if thread.is_alive():
            raise WeightError(f"the transfer before this one has not ended within {timeout_s:g} s")


def _text(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} {list(kind[1])}"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, LeewayError) else f"{type(error).__name__}: {first_line(error)}"
