"""The bytes of a version in memory: buffer, digests, and how the learner fills one.

Whoever fills a buffer says how far it is (``Watermark``), so that digests and sending can follow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from common.errors import WeightError
from common.memory import free_bytes, refuse_what_does_not_fit
from common.weights import DTYPES, Entry, Manifest, lay_out

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Watermark:
    """How many bytes of a buffer are there, for threads that follow the one that fills it."""

    def __init__(self, there: int = 0) -> None:
        self._there, self._fault = there, ""
        self._changed = threading.Condition()

    def raise_to(self, there: int) -> None:
        with self._changed:
            self._there = there
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """No more will come."""
        with self._changed:
            self._fault = reason
            self._changed.notify_all()

    def wait_for(self, there: int, timeout_s: float) -> None:
        """Raises WeightError when no more will come, or nothing has come for ``timeout_s``."""
        with self._changed:
            while (before := self._there) < there and not self._fault:
                if not self._changed.wait_for(lambda: self._there > before or self._fault, timeout_s):
                    raise WeightError(f"only {before} of {there} bytes of the weights came; none for {timeout_s:g} s")
            if self._there < there:
                raise WeightError(self._fault)


class Buffer:
    """The bytes of one version in memory. They are kept when the next version has the same size."""

    def __init__(self, file: Path | None = None, device: torch.device | str = "cpu") -> None:
        """
        Args:
            file: where the bytes lie, shared with other processes of this host (in /dev/shm); default: here alone.
            device: whose memory to use, without a file.
        """
        self.manifest: Manifest | None = None
        self.device = torch.device(device)
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._file = file

    def prepare(self, manifest: Manifest) -> None:
        """Make room for ``manifest``; the contents are then undefined, or, in a file, what the file has.

        Raises:
            WeightError: there is not so much memory.
        """
        if self.bytes.numel() != manifest.total_bytes:
            self.refuse_what_does_not_fit(manifest)
            self.bytes = self._allocate(manifest.total_bytes)
        self.manifest = manifest

    def refuse_what_does_not_fit(self, manifest: Manifest) -> None:
        """Raises WeightError, with both figures, if there is no room for ``manifest``."""
        size, what = manifest.total_bytes, "one version of the weights"
        if self.bytes.numel() == size:
            return
        if self._file is None:
            refuse_what_does_not_fit(
                what, size - self.bytes.numel(), free=free_on(self.device), where=_memory(self.device)
            )
        elif not self._file.exists() or self._file.stat().st_size != size:
            folder = self._file.parent
            refuse_what_does_not_fit(what, size, free=free_bytes(folder), where=f"in {folder}")

    def _allocate(self, size: int) -> torch.Tensor:
        if self._file is None:
            return torch.zeros(size, dtype=torch.uint8, device=self.device)
        return torch.from_file(str(self._file), shared=True, size=size, dtype=torch.uint8)

    def bucket(self, index: int) -> torch.Tensor:
        """[bytes] uint8, a view."""
        assert self.manifest is not None
        return self.bytes[self.manifest.bucket(index)]

    def view(self, entry: Entry) -> torch.Tensor:
        """The tensor at ``entry``, as a view of the buffer."""
        return view_as(self.bytes[entry.offset : entry.end], entry)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name, as views."""
        assert self.manifest is not None
        for entry in self.manifest.entries:
            yield entry.name, self.view(entry)

    def digest(self, entry: Entry) -> int:
        return digest(self.bytes[entry.offset : entry.end])


def view_as(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    """[bytes] uint8 as the tensor that ``entry`` describes."""
    return data.view(DTYPES[entry.dtype]).view(entry.shape)


def free_on(device: torch.device) -> int | None:
    """Free bytes of a device's memory; None: not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()


def _memory(device: torch.device) -> str:
    return "of host memory" if device.type == "cpu" else f"on {device}"


def digest(data: torch.Tensor) -> int:
    """Sum of the bytes as 64-bit words, wrapping: finds faults, not forgers. About memory speed, on any device.

    data: [bytes] uint8, aligned to 8 bytes.
    """
    words = data.numel() // 8
    total = int(data[: words * 8].view(torch.int64).sum()) if words else 0
    tail = int.from_bytes(bytes(data[words * 8 :].tolist()), "little")
    return (total + tail + (1 << 63)) % (1 << 64) - (1 << 63)


def with_digests(buffer: Buffer, filled: Watermark | None = None, timeout_s: float = 0.0) -> Manifest:
    """The manifest of what is in ``buffer``, digests of its bytes included.

    filled: follow the thread that fills the buffer, tensor by tensor.

    Raises:
        WeightError: see ``Watermark``.
    """
    m = buffer.manifest
    assert m is not None
    digests = []
    for entry in m.entries:
        if filled is not None:
            filled.wait_for(entry.end, timeout_s)
        digests.append(buffer.digest(entry))
    return Manifest(m.entries, m.bucket_bytes, tuple(digests))


def pack_digests(m: Manifest) -> torch.Tensor:
    """[8 · tensors] uint8: what is sent after the last bucket."""
    return torch.tensor(m.digests, dtype=torch.int64).view(torch.uint8)


def check_digests(m: Manifest, sent: torch.Tensor) -> None:
    """Raises WeightError, naming the tensor, unless the digests of what was received are those ``sent``."""
    for entry, mine, theirs in zip(m.entries, m.digests, sent.view(torch.int64).tolist(), strict=True):
        if mine != theirs:
            raise WeightError(f"tensor {entry.name}: the bytes received are not those sent (digest differs)")


# ---------------------------------------------------------------- copy-out
@runtime_checkable
class Described(Protocol):
    """Tensors by name that say what they will be before one of them is made (gathered, merged)."""

    def kinds(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each, in their order."""


def layout_of(tensors: object, *, bucket_bytes: int, dtype: torch.dtype | None = None) -> Manifest | None:
    """How ``tensors`` will lie, floating-point ones as ``dtype``; None if they do not say.

    Raises:
        WeightError: see ``lay_out``.
    """
    if not isinstance(tensors, Described):
        return None
    sent = None if dtype is None else _NAMES[dtype]
    kinds = ((n, sent if sent and DTYPES[kind].is_floating_point else kind, s) for n, kind, s in tensors.kinds())
    return lay_out(kinds, bucket_bytes)


def copy_out(
    tensors: Iterable[tuple[str, torch.Tensor]],
    buffer: Buffer,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> Manifest:
    """Copy ``tensors`` into ``buffer``, floating-point ones as ``dtype``. All are there at once, to be laid out.

    Raises:
        WeightError: see ``lay_out``.
    """
    named = [(name, _whole(t)) for name, t in tensors]
    manifest = lay_out(((name, *_kind(name, t, dtype)) for name, t in named), bucket_bytes)
    buffer.prepare(manifest)
    with torch.no_grad():
        for entry, (_, tensor) in zip(manifest.entries, named, strict=True):
            buffer.view(entry).copy_(tensor)
    return manifest


def copy_out_as(
    layout: Manifest,
    tensors: Iterator[tuple[str, torch.Tensor]],
    buffer: Buffer,
    filled: Watermark,
    dtype: torch.dtype | None = None,
) -> list[tuple[str, torch.Tensor]]:
    """``copy_out`` for a known layout, tensor by tensor, so that others may already read what ``filled`` says.

    Returns nothing, or, if the tensors are others than in ``layout``, those that it has seen (``tensors``
    still has the rest).
    """
    buffer.prepare(layout)
    with torch.no_grad():
        for index, entry in enumerate(layout.entries):
            name, tensor = next(tensors, ("", torch.empty(0)))
            if (name, *_kind(name, tensor, dtype)) != (entry.name, entry.dtype, entry.shape):
                seen = [(e.name, buffer.view(e).clone()) for e in layout.entries[:index]]
                return [*seen, *([(name, tensor)] if name else [])]
            buffer.view(entry).copy_(_whole(tensor))
            filled.raise_to(entry.end)
    for more in tensors:
        return [*((e.name, buffer.view(e).clone()) for e in layout.entries), more]
    filled.raise_to(layout.total_bytes)
    return []


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor (DTensor) gathered; a collective, so all ranks must come here in one order."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor.detach() if gather is None else gather().detach()
    return whole


def _kind(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> tuple[str, tuple[int, ...]]:
    """Its dtype on the way, and its shape."""
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if target not in _NAMES:
        raise WeightError(f"tensor {name}: dtype {target} does not travel; one of {', '.join(DTYPES)}")
    return _NAMES[target], tuple(tensor.shape)
