"""Seeded permutations that need no memory: the i-th element is computed when asked for.

A Feistel network over the smallest even number of bits that holds ``size``, walked along its cycle
until it falls inside; so the order of a million rows costs nothing to keep and to resume.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

_NUMBERS = (b"\0", b"\1", b"\2", b"\3")  # of the rounds


def permute(i: int, size: int, key: str) -> int:
    """The i-th element of the permutation of ``range(size)`` that ``key`` names (0 ≤ i < size)."""
    if not 0 <= i < size:
        raise IndexError(f"{i} is not in range({size})")
    half = ((size - 1).bit_length() + 1) // 2
    if half == 0:
        return 0
    keyed = _keyed(key)
    while True:
        i = _feistel(i, half, keyed)
        if i < size:
            return i


@lru_cache(maxsize=64)
def _keyed(key: str) -> Any:
    """A hash that has taken in the key; a copy of it is cheaper than another."""
    secret = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return hashlib.blake2b(digest_size=8, key=secret)


def _feistel(i: int, half: int, keyed: Any) -> int:
    mask = (1 << half) - 1
    left, right = i >> half, i & mask
    for number in _NUMBERS:
        mixed = keyed.copy()
        mixed.update(right.to_bytes(8, "little") + number)
        left, right = right, left ^ (int.from_bytes(mixed.digest(), "little") & mask)
    return left << half | right
