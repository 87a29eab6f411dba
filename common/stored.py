"""A version of the weights as a Hugging Face folder on disk: how it is written, and read into a buffer.

    RUN_DIR/weights/17/  model.safetensors       or shards and model.safetensors.index.json
                         config.json, …          of the model, with the dtype of these weights; tokenizer
                         manifest.json           size and SHA-256 of each file (``common/hashes.py``); written last

The folder is named when it is whole. It is not flushed to disk: it is no checkpoint, most are removed before the
kernel would write them, and a torn one is seen by its digests. Engines read it with ``preadv`` straight into their
buffers. It is not mapped: a file that is cut off or goes away while it is read is an error by tensor name here, and
would be the end of a process that has mapped it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.buffers import Buffer
from common.errors import WeightError
from common.hashes import MANIFEST, sha256
from common.tensor_files import INDEX, SINGLE, read_header
from common.weights import Entry, Manifest

SCHEMA = 1
SHARD_BYTES = 5 << 30
PIECE_BYTES = 16 << 20  # written at once
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A version that lies on disk."""

    version: int
    path: Path
    layout: Manifest


# ---------------------------------------------------------------- written
def write_version(
    folder: Path,
    buffer: Buffer,
    version: int,
    *,
    beside: Sequence[Path] = (),
    on_bytes: Callable[[int], None] = lambda count: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what is in ``buffer`` into ``folder``, which exists and is empty.

    Args:
        beside: config.json, tokenizer, …; copied, the config with the dtype of these weights.
        on_bytes: called with the number of bytes after each piece; what it raises ends the writing.

    Raises:
        OSError: the disk is full, …
    """
    manifest = buffer.manifest
    assert manifest is not None
    shards = _shards(manifest, shard_bytes)
    files: dict[str, dict[str, Any]] = {}
    weight_map: dict[str, str] = {}
    for index, entries in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        weight_map |= {e.name: name for e in entries}
        files[name] = _write_shard(folder / name, entries, buffer, on_bytes)
    if len(shards) > 1:
        total = sum(e.num_bytes for e in manifest.entries)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    dtype = next((e.dtype for e in manifest.entries if "float" in e.dtype), "float32")
    for file in beside:
        _write_beside(folder / file.name, file.read_bytes(), dtype)
    for path in sorted(folder.iterdir()):
        files.setdefault(path.name, {"bytes": path.stat().st_size, "sha256": sha256(path)})
    _write_json(folder / MANIFEST, {"schema": SCHEMA, "version": version, "files": files})


def _shards(manifest: Manifest, shard_bytes: int) -> list[list[Entry]]:
    """In order; one begins where the next tensor would make it too large."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in manifest.entries:
        if shards[-1] and size + entry.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _write_shard(path: Path, entries: list[Entry], buffer: Buffer, on_bytes: Callable[[int], None]) -> dict[str, Any]:
    """A safetensors file: length of the header (8 bytes), header (JSON), tensors end to end. Its size and SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for e in entries:
        header[e.name] = {"dtype": _DTYPES[e.dtype], "shape": list(e.shape), "data_offsets": [at, at + e.num_bytes]}
        at += e.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        head = memoryview(struct.pack("<Q", len(text)) + text)
        for left in (head, *(_bytes_of(buffer, e) for e in entries)):
            while left:
                written = file.write(left[:PIECE_BYTES])
                sha.update(left[:written])
                left, size = left[written:], size + written
                on_bytes(written)
    return {"bytes": size, "sha256": sha.hexdigest()}


def _bytes_of(buffer: Buffer, entry: Entry) -> memoryview:
    data: memoryview = buffer.bytes[entry.offset : entry.end].numpy().data
    return data


def _write_beside(path: Path, content: bytes, dtype: str) -> None:
    if path.name != "config.json":
        path.write_bytes(content)
        return
    config = json.loads(content)
    config.pop("torch_dtype", None)  # the older name
    _write_json(path, {**config, "dtype": dtype})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- read
@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes begin in a file."""

    entry: Entry
    path: Path
    file: int  # descriptor
    offset: int


class StoredVersion:
    """A stored version, read by position in the buffer that ``layout`` describes."""

    def __init__(self, path: Path, layout: Manifest) -> None:
        """Raises WeightError, by tensor name where there is one, if it is not what ``layout`` says."""
        self._files: dict[Path, tuple[int, dict[str, Any]]] = {}  # descriptor; tensors, with absolute offsets
        try:
            shards = _weight_map(path)
            self._places = [self._place(path, e, shards) for e in layout.entries]
        except BaseException as e:
            self.close()
            if isinstance(e, OSError):
                raise WeightError(
                    f"{e.filename or path}: {e.strerror}; generators read versions there, so share that folder with "
                    "this host, or set weights.snapshot=zmq"
                ) from None
            raise
        self._offsets = [p.entry.offset for p in self._places]

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the buffer's bytes from ``start`` on. Raises WeightError, by tensor name."""
        stop = start + len(into)
        for place in self._places[max(0, bisect_right(self._offsets, start) - 1) :]:
            entry = place.entry
            if entry.offset >= stop:
                return
            first, last = max(entry.offset, start), min(entry.end, stop)
            if first < last:
                _read(place, first - entry.offset, into[first - start : last - start])

    def close(self) -> None:
        files, self._files = self._files, {}
        for file, _ in files.values():
            os.close(file)

    def _place(self, folder: Path, entry: Entry, shards: dict[str, str] | None) -> _Place:
        name = SINGLE if shards is None else shards.get(entry.name)
        if name is None:
            raise WeightError(f"tensor {entry.name}: is not in {folder / INDEX}")
        path = folder / name
        file, tensors = self._open(path)
        found, wanted = tensors.get(entry.name), (_DTYPES[entry.dtype], entry.shape, entry.num_bytes)
        if found is None:
            raise WeightError(f"tensor {entry.name}: is not in {path}")
        if found[:3] != wanted:
            raise WeightError(
                f"tensor {entry.name}: {path} has {found[0]} {list(found[1])}, the learner says {wanted[0]} "
                f"{list(wanted[1])}"
            )
        return _Place(entry, path, file, found[3])

    def _open(self, path: Path) -> tuple[int, dict[str, Any]]:
        if path not in self._files:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._files[path] = (file, {})  # so that it is closed if it cannot be read
            self._files[path] = (file, _tensors_in(path, file))
        return self._files[path]


def _weight_map(folder: Path) -> dict[str, str] | None:
    """File by tensor; None: there is one file."""
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        shards = {str(k): str(v) for k, v in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise WeightError(f"{index}: cannot be read ({type(e).__name__}: {e})") from None
    if strange := next((v for v in shards.values() if not _SHARD.fullmatch(v)), None):
        raise WeightError(f"{index}: names a file {strange[:140]!r}, which is none of this folder's")
    return shards


def _tensors_in(path: Path, file: int) -> dict[str, Any]:
    """``(dtype, shape, bytes, offset in the file)`` by tensor. Raises WeightError."""
    try:
        header, start = read_header(file)
        return {
            name: (t["dtype"], tuple(t["shape"]), t["data_offsets"][1] - t["data_offsets"][0],
                   start + t["data_offsets"][0])
            for name, t in header.items()
        }  # fmt: skip
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise WeightError(f"{path}: is no safetensors file ({type(e).__name__}: {e})") from None


def _read(place: _Place, offset: int, into: memoryview) -> None:
    at = place.offset + offset
    while into:
        try:
            count = os.preadv(place.file, [into], at)
        except OSError as e:
            raise WeightError(f"tensor {place.entry.name}: {place.path}: {e.strerror}") from None
        if count == 0:
            raise WeightError(f"tensor {place.entry.name}: {place.path} ends before its last byte")
        into, at = into[count:], at + count
