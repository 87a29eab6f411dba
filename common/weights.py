"""What one version of the weights looks like in flight: manifest and buckets.

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
from typing import Any

import numpy as np
import torch

from common.errors import WeightError
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
