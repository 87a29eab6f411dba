"""What the ranks of one learner tell each other, as bytes: msgpack, never pickle.

Beside what msgpack knows these come back as the types they were: tuples, paths, and the dataclasses
marked with `between_ranks`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgpack

_TUPLE, _PATH, _RECORD = range(3)
_RECORDS: dict[str, type] = {}
C = TypeVar("C", bound=type)


def between_ranks(record: C) -> C:
    """Marks a dataclass whose instances one rank may tell the others."""
    _RECORDS[record.__name__] = record
    return record


def pack(value: Any) -> bytes:
    """Raises TypeError for what is not plain data."""
    return msgpack.packb(value, default=_special, strict_types=True)  # type: ignore[no-any-return]


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_read, strict_map_key=False)


def _special(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, Path):
        return msgpack.ExtType(_PATH, str(value).encode())
    if _RECORDS.get(kind.__name__) is kind:
        return msgpack.ExtType(_RECORD, pack([kind.__name__, *(getattr(value, f.name) for f in fields(kind))]))
    raise TypeError(f"a {kind.__name__} is not for other ranks; see learner/plain.py")


def _read(code: int, data: bytes) -> Any:
    if code == _PATH:
        return Path(data.decode())
    values = unpack(data)
    return tuple(values) if code == _TUPLE else _RECORDS[values[0]](*values[1:])
