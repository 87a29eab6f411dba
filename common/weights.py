"""What one version of the weights looks like in flight: manifest, buckets, digests.

All tensors of a version lie end to end in one host buffer, each aligned to 64 bytes; a bucket is
a slice of that buffer, so a tensor may begin in one bucket and end in another. Sender and
receivers have the same layout, and both reuse their buffer for the next version.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import WeightError
from common.memory import refuse_what_does_not_fit
from common.wire import pack, unpack

ALIGNMENT = 64  # bytes; a view of any dtype may start there
SCHEMA = 1
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: ``("model.norm.weight", "float32", (128,), 524288)``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the buffer

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class Manifest:
    """The layout of one version. ``digests`` has one number per entry, or none yet."""

    entries: tuple[Entry, ...]
    bucket_bytes: int
    digests: tuple[int, ...] = ()

    @cached_property
    def total_bytes(self) -> int:
        return _align(self.entries[-1].end)

    @cached_property
    def num_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    def bucket(self, index: int) -> slice:
        """Bytes ``[start, stop)`` of the buffer."""
        start = index * self.bucket_bytes
        return slice(start, min(start + self.bucket_bytes, self.total_bytes))

    @property
    def digest(self) -> int:
        """One number for the whole version: of names, layout and the digests of all tensors."""
        return zlib.crc32(encode_manifest(self))


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int) -> Manifest:
    """A manifest for tensors given as ``(name, dtype, shape)``, in the order in which they come.

    Raises:
        WeightError: a name twice, a dtype that does not travel, no tensors, a bad bucket size.
    """
    entries: list[Entry] = []
    names: set[str] = set()
    offset = 0
    for name, dtype, shape in tensors:
        if name in names:
            raise WeightError(f"tensor {name} is there twice")
        if dtype not in DTYPES:
            raise WeightError(f"tensor {name}: dtype {dtype} does not travel; one of {', '.join(DTYPES)}")
        names.add(name)
        entry = Entry(name, dtype, tuple(shape), offset)
        entries.append(entry)
        offset = _align(entry.end)
    if not offset:
        raise WeightError("there are no weights to send")
    if bucket_bytes < ALIGNMENT:
        raise WeightError(f"weights.bucket_bytes={bucket_bytes}: at least {ALIGNMENT}")
    return Manifest(tuple(entries), bucket_bytes // ALIGNMENT * ALIGNMENT)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------- on the wire
def encode_manifest(m: Manifest) -> bytes:
    """Columns, not rows: few containers, however many tensors there are."""
    dims = [d for e in m.entries for d in e.shape]
    return pack(
        {
            "v": SCHEMA,
            "bucket_bytes": m.bucket_bytes,
            "names": "\0".join(e.name for e in m.entries).encode(),
            "dtypes": bytes(list(DTYPES).index(e.dtype) for e in m.entries),
            "ndims": bytes(len(e.shape) for e in m.entries),
            "dims": np.array(dims, dtype="<i8").tobytes(),
            "digests": np.array(m.digests, dtype="<i8").tobytes(),
        }
    )


def decode_manifest(data: bytes) -> Manifest:
    """Raises WeightError (WireError from the decoder) for what is not a manifest."""
    m = unpack(data)
    if not isinstance(m, dict) or m.get("v") != SCHEMA:
        raise WeightError("the manifest has another schema; run the same Leeway everywhere")
    try:
        manifest = lay_out(_rows(m), int(m["bucket_bytes"]))
        digests = tuple(int(d) for d in np.frombuffer(m["digests"], dtype="<i8"))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise WeightError(f"not a manifest ({type(e).__name__}: {e})") from None
    if len(digests) not in (0, len(manifest.entries)):
        raise WeightError(f"not a manifest ({len(digests)} digests for {len(manifest.entries)} tensors)")
    return Manifest(manifest.entries, manifest.bucket_bytes, digests)


def _rows(m: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    kinds = list(DTYPES)
    dims = np.frombuffer(m["dims"], dtype="<i8")
    if (dims < 0).any():
        raise ValueError("a negative dimension")
    at = 0
    for name, kind, ndim in zip(m["names"].decode().split("\0"), m["dtypes"], m["ndims"], strict=True):
        yield name, kinds[kind], tuple(int(d) for d in dims[at : at + ndim])
        at += ndim
    if at != len(dims):
        raise ValueError("dimensions left over")


# ---------------------------------------------------------------- bytes
class HostBuffer:
    """The bytes of one version in host memory. The buffer is kept when the next version has the same size."""

    def __init__(self, file: Path | None = None) -> None:
        """file: where the bytes lie, shared with other processes of this host (in /dev/shm); default: here alone."""
        self.manifest: Manifest | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._file = file

    def prepare(self, manifest: Manifest) -> None:
        """Make room for ``manifest``; the contents are then undefined, or, in a file, what the file has.

        Raises:
            WeightError: there is not so much memory.
        """
        if self.bytes.numel() != manifest.total_bytes:
            self.bytes = self._allocate(manifest.total_bytes)
        self.manifest = manifest

    def _allocate(self, size: int) -> torch.Tensor:
        if self._file is None:
            refuse_what_does_not_fit("one version of the weights", size - self.bytes.numel())
            return torch.zeros(size, dtype=torch.uint8)
        if not self._file.exists() or self._file.stat().st_size != size:
            refuse_what_does_not_fit("one version of the weights", size, self._file.parent)
        return torch.from_file(str(self._file), shared=True, size=size, dtype=torch.uint8)

    def bucket(self, index: int) -> torch.Tensor:
        """[bytes] uint8, a view."""
        assert self.manifest is not None
        return self.bytes[self.manifest.bucket(index)]

    def view(self, entry: Entry) -> torch.Tensor:
        """The tensor at ``entry``, as a view of the buffer."""
        return self.bytes[entry.offset : entry.end].view(DTYPES[entry.dtype]).view(entry.shape)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name, as views."""
        assert self.manifest is not None
        for entry in self.manifest.entries:
            yield entry.name, self.view(entry)

    def digest(self, entry: Entry) -> int:
        return digest(self.bytes[entry.offset : entry.end].numpy())


def digest(data: NDArray[np.uint8]) -> int:
    """Sum of the bytes as 64-bit words, wrapping: finds faults, not forgers. About memory speed."""
    words = data.size // 8
    total = int(np.add.reduce(data[: words * 8].view("<i8"), dtype=np.int64)) if words else 0
    tail = int.from_bytes(data[words * 8 :].tobytes(), "little")
    return (total + tail + (1 << 63)) % (1 << 64) - (1 << 63)


def copy_out(
    tensors: Iterable[tuple[str, torch.Tensor]],
    buffer: HostBuffer,
    *,
    bucket_bytes: int,
    known: Manifest | None = None,
    dtype: torch.dtype | None = None,
) -> Manifest:
    """Copy ``tensors`` into ``buffer``, floating-point ones as ``dtype``; the learner's whole stall.

    Args:
        known: the layout of the version before; taken over if names, shapes and dtypes are the same.

    Raises:
        WeightError: see ``lay_out``.
    """
    named = [(name, _whole(t)) for name, t in tensors]
    rows = [(name, _dtype_name(name, t, dtype), tuple(t.shape)) for name, t in named]
    manifest = known
    if known is None or [(e.name, e.dtype, e.shape) for e in known.entries] != rows:
        manifest = lay_out(rows, bucket_bytes)
    assert manifest is not None
    buffer.prepare(Manifest(manifest.entries, manifest.bucket_bytes))
    with torch.no_grad():
        for entry, (_, tensor) in zip(manifest.entries, named, strict=True):
            buffer.view(entry).copy_(tensor)
    return manifest


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor (DTensor) gathered; a collective, so all ranks must come here in one order."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor.detach() if gather is None else gather().detach()
    return whole


def _dtype_name(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if target not in _NAMES:
        raise WeightError(f"tensor {name}: dtype {target} does not travel; one of {', '.join(DTYPES)}")
    return _NAMES[target]


def with_digests(buffer: HostBuffer) -> Manifest:
    """The manifest of what is in ``buffer``, digests of its bytes included."""
    m = buffer.manifest
    assert m is not None
    return Manifest(m.entries, m.bucket_bytes, tuple(buffer.digest(e) for e in m.entries))
