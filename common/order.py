"""Seeded permutations that need no memory: the i-th element is computed when asked for.

A Feistel network over the smallest even number of bits that holds ``size``, walked along its cycle
until it falls inside; so the order of a million rows costs nothing to keep and to resume.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4


def permute(i: int, size: int, key: str) -> int:
    """The i-th element of the permutation of ``range(size)`` that ``key`` names (0 ≤ i < size)."""
    if not 0 <= i < size:
        raise IndexError(f"{i} is not in range({size})")
    half = ((size - 1).bit_length() + 1) // 2
    if half == 0:
        return 0
    secret = hashlib.blake2b(key.encode(), digest_size=16).digest()
    while True:
        i = _feistel(i, half, secret)
        if i < size:
            return i


def _feistel(i: int, half: int, secret: bytes) -> int:
    mask = (1 << half) - 1
    left, right = i >> half, i & mask
    for number in range(_ROUNDS):
        block = right.to_bytes(8, "little") + bytes([number])
        mixed = hashlib.blake2b(block, digest_size=8, key=secret).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
    return left << half | right
