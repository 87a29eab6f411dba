"""Lists and maps inside messages, whose elements the schema of headers leaves open."""

from __future__ import annotations

import math
import re
from typing import Any

from common.errors import WireError

_NOT_A_WORD = re.compile(r"[^A-Za-z0-9_.-]+")


def int_lists(value: list[Any], length: int, name: str) -> list[tuple[int, ...]]:
    """``[[1, 2], …]`` → tuples of ``length`` integers."""
    for item in value:
        if not isinstance(item, list) or len(item) != length or not all(type(x) is int for x in item):
            raise WireError("wrong_type", f"{name}: not lists of {length} integers")
    return [tuple(item) for item in value]


def span(value: Any, name: str) -> tuple[float, float]:
    """``[start, end]`` in seconds, start ≤ end."""
    if isinstance(value, list) and len(value) == 2 and all(_is_number(x) for x in value) and value[0] <= value[1]:
        return float(value[0]), float(value[1])
    raise WireError("wrong_type", f"{name}: not [start, end] in seconds")


def numbers(value: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a map; whatever else is in it is ignored."""
    return {k[:64]: float(v) for k, v in list(value.items())[:64] if _is_number(v)}


def word(text: str) -> str:
    """A reason as one short word, fit to be counted and read: ``reward timeout!`` → ``reward_timeout``."""
    return _NOT_A_WORD.sub("_", text).strip("_")[:64] or "unnamed"


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e18 and math.isfinite(x)
