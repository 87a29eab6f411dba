"""Seeded permutations that need no memory: the i-th element is computed when asked for.

A Feistel network over the smallest even number of bits that holds ``size``, walked along its cycle
until it falls inside; so the order of a million rows costs nothing to keep and to resume.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

MAX_TABLE_BITS = 10  # up to a million rows: 4 · 2¹⁰ hashes, once for a key
_NUMBERS = (b"\0", b"\1", b"\2", b"\3")  # of the rounds


def permute(i: int, size: int, key: str) -> int:
    """The i-th element of the permutation of ``range(size)`` that ``key`` names (0 ≤ i < size)."""
    if not 0 <= i < size:
        raise IndexError(f"{i} is not in range({size})")
    half = ((size - 1).bit_length() + 1) // 2
    if half == 0:
        return 0
    mask = (1 << half) - 1
    rounds = _tables(key, half) if half <= MAX_TABLE_BITS else [_Round(key, number, mask) for number in _NUMBERS]
    while True:
        left, right = i >> half, i & mask
        for mixed in rounds:
            left, right = right, left ^ mixed[right]
        i = left << half | right
        if i < size:
            return i


class _Round:
    """The mixing function of a round: ``self[right]``."""

    def __init__(self, key: str, number: bytes, mask: int) -> None:
        self._keyed, self._number, self._mask = _keyed(key), number, mask

    def __getitem__(self, right: int) -> int:
        mixed = self._keyed.copy()
        mixed.update(right.to_bytes(8, "little") + self._number)
        return int.from_bytes(mixed.digest(), "little") & self._mask


@lru_cache(maxsize=8)
def _tables(key: str, half: int) -> list[list[int]]:
    """The rounds, all their values at once: few beside the rows that they order."""
    mask = (1 << half) - 1
    return [[mixed[right] for right in range(mask + 1)] for mixed in (_Round(key, n, mask) for n in _NUMBERS)]


@lru_cache(maxsize=64)
def _keyed(key: str) -> Any:
    """A hash that has taken in the key; a copy of it is cheaper than another."""
    secret = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return hashlib.blake2b(digest_size=8, key=secret)
