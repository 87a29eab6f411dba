"""The receiving end of a transfer, in a worker of the engine (no vLLM here).

A thread receives a whole version into one buffer, which is reused, while the engine goes on sampling;
another one computes the digest of each tensor beside it. What came of it is posted. Until then, and if
anything fails, the engine's weights are untouched.

`weights.staging` says where the buffer lies: in host memory (``host``), where the workers of a
tensor-parallel engine share one, a file in memory: the first receives for all, the others look into it
when they load; or in each worker's device memory (``device``). ``none`` has no buffer: ``Arriving``
hands each tensor to the engine as it comes, while the engine pauses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import LeewayError, OtherModelError, WeightError
from common.failpoints import failpoint
from common.transfer import Group, KeptGroups, Ticket, first_line, join_group
from common.weights import (
    Buffer,
    Entry,
    Manifest,
    Watermark,
    check_digests,
    decode_manifest,
    digest,
    view_as,
    with_digests,
)

Post = Callable[..., None]  # post(op, **fields): an event of WORKER_OPS
Shapes = Mapping[str, tuple[int, ...]]


class Layout:
    """Which tensors this engine takes: those of its model, later exactly those of the version before."""

    def __init__(self, model: Shapes | None = None) -> None:
        """model: name and shape of each tensor of the engine's model; None: not known."""
        self._model = model
        self._before: Manifest | None = None

    def accept(self, manifest: bytes) -> Manifest:
        """What is to come.

        Raises:
            WeightError: it cannot be read, or is not laid out as the version before.
            OtherModelError: it is not this engine's model.
        """
        wanted = decode_manifest(manifest)
        if self._before is None:
            self._refuse_other_model(wanted)
        elif self._before.entries != wanted.entries:
            mine: dict[str, Any] = {e.name: (e.dtype, e.shape) for e in self._before.entries}
            new: dict[str, Any] = {e.name: (e.dtype, e.shape) for e in wanted.entries}
            for name in [*mine, *new]:
                if mine.get(name) != new.get(name):
                    was, sent = _text(mine.get(name)), _text(new.get(name))
                    raise WeightError(f"tensor {name}: {sent} is sent, {was} was before")
            raise WeightError("the tensors come in another order than before")
        return wanted

    def keep(self, manifest: Manifest) -> None:
        """A version laid out like this is complete here."""
        self._before = self._before or manifest

    def _refuse_other_model(self, wanted: Manifest) -> None:
        if self._model is None:
            return
        sent = {e.name: e.shape for e in wanted.entries}
        for name in [*self._model, *sent]:
            if sent.get(name) != self._model.get(name):
                theirs, mine = (
                    str(list(s)) if s is not None else "none" for s in (sent.get(name), self._model.get(name))
                )
                raise OtherModelError(f"tensor {name}: the learner sends {theirs}, this engine's model has {mine}")


class Line:
    """A worker's groups with the learner: one at a time, kept for the next transfer while all goes well."""

    def __init__(self) -> None:
        self._kept = KeptGroups()
        self._joined = ""  # prefix of the group that was joined last

    def join(self, ticket: Ticket, *, rank: int, world_size: int, timeout_s: float) -> Group:
        """The group kept from the transfer before, if this is its ticket; else another one. Raises WeightError."""
        kept = self._kept.take(b"", ticket.transport)
        if kept is not None and kept[0] == ticket:
            return kept[1]
        if kept is not None:
            kept[1].close()
        if ticket.prefix == self._joined:
            raise WeightError("the group of the transfer before is gone here")
        self._joined = ticket.prefix
        return join_group(ticket, rank=rank, world_size=world_size, timeout_s=timeout_s)

    def end(self, ticket: Ticket, group: Group, *, well: bool) -> None:
        if well:
            self._kept.keep(b"", ticket, group)
        else:
            group.close()


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
        self._through_host = device is not None
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
        through = torch.empty(manifest.bucket(0).stop if self._through_host else 0, dtype=torch.uint8)
        filled = Watermark()
        following = _Following(self._buffer, filled, timeout_s)
        try:
            for index in range(manifest.num_buckets):
                bucket = self._buffer.bucket(index)
                host = through[: len(bucket)] if self._through_host else bucket
                receive_bucket(group, host, index, manifest)
                if self._through_host:
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
        self._sealed: Manifest | None = None
        self.start()

    def run(self) -> None:
        try:
            self._sealed = with_digests(self._buffer, self._filled, 2 * self._timeout_s)
        except WeightError:
            pass  # the receiving was torn, and says so

    def result(self) -> Manifest:
        self.join(self._timeout_s)
        if self._sealed is None:
            raise WeightError(f"no digests of what was received within {self._timeout_s:g} s")
        return self._sealed


class Arriving:
    """A version that is loaded as it comes, without a copy of it in between; of the worker's main thread.

    Until the first bucket is there nothing has changed. After that the model is a mixture until
    ``check`` has returned.
    """

    def __init__(
        self, manifest: Manifest, line: Line, *, ticket: list[Any], rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Joins the group and takes the first bucket. Raises WeightError."""
        self._manifest = manifest
        self._bucket = torch.empty(manifest.bucket(0).stop, dtype=torch.uint8)
        self._digests: list[int] = []
        self._line, self._ticket, self._went_well = line, Ticket(*ticket), False
        self._group = line.join(self._ticket, rank=rank, world_size=world_size, timeout_s=timeout_s)
        try:
            receive_bucket(self._group, self._bucket, 0, manifest)
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor when its last byte is there; the caller may keep it."""
        m, index = self._manifest, 0
        for entry in m.entries:
            data = torch.empty(entry.num_bytes, dtype=torch.uint8)
            at = entry.offset
            while at < entry.end:
                while at >= m.bucket(index).stop:
                    index += 1
                    receive_bucket(self._group, self._bucket[: _size(m, index)], index, m)
                at += self._take(data, entry, at, index)
            self._digests.append(digest(data))
            yield entry.name, view_as(data, entry)

    def _take(self, data: torch.Tensor, entry: Entry, at: int, index: int) -> int:
        """What of ``entry`` this bucket has, from byte ``at`` of the version on; how much."""
        bucket = self._manifest.bucket(index)
        stop = min(entry.end, bucket.stop)
        data[at - entry.offset : stop - entry.offset] = self._bucket[at - bucket.start : stop - bucket.start]
        return stop - at

    def check(self) -> int:
        """After all tensors: the version's digest. Raises WeightError, naming the tensor that is not what was sent."""
        m = self._manifest
        sealed = Manifest(m.entries, m.bucket_bytes, tuple(self._digests))
        if len(self._digests) != len(m.entries):
            raise WeightError(f"the engine took {len(self._digests)} of {len(m.entries)} tensors")
        check_digests(sealed, receive_digests(self._group, m))
        self._went_well = True
        return sealed.digest

    def close(self) -> None:
        self._line.end(self._ticket, self._group, well=self._went_well)


# ---------------------------------------------------------------- what both do
def receive_bucket(group: Group, bucket: torch.Tensor, index: int, manifest: Manifest) -> None:
    failpoint("staging.bucket")
    try:
        group.receive(bucket)
    except (RuntimeError, WeightError) as e:
        raise WeightError(f"bucket {index} of {manifest.num_buckets}: {first_line(e)}") from None


def receive_digests(group: Group, manifest: Manifest) -> torch.Tensor:
    """[8 · tensors] uint8, as ``pack_digests`` has them."""
    digests = torch.empty(8 * len(manifest.entries), dtype=torch.uint8)
    try:
        group.receive(digests)
    except (RuntimeError, WeightError) as e:
        raise WeightError(f"digests: {first_line(e)}") from None
    return digests


def _size(manifest: Manifest, index: int) -> int:
    bucket = manifest.bucket(index)
    return bucket.stop - bucket.start


def _wait_for(thread: threading.Thread | None, timeout_s: float) -> None:
    """The transfer before this one: its group is closed, so it ends soon; both use one buffer."""
    if thread is not None:
        thread.join(timeout_s)
        if thread.is_alive():
            raise WeightError(f"the transfer before this one has not ended within {timeout_s:g} s")


def _text(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} {list(kind[1])}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, LeewayError) else f"{type(error).__name__}: {first_line(error)}"
