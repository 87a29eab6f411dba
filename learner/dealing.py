"""A batch fetched by several ranks: which groups each one gets, and how the parts become one batch.

Each rank fetches and decodes the payloads of its own share, so that they cross the broker's socket once
and decoding is divided. What the ranks then exchange are flat arrays (`learner.batch.Columns`), since every
rank holds the small tensors of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from learner.batch import Batch, Columns, columns_of, lay_out, make_batch
from learner.ranks import Ranks

Part = Any  # of a batch, ready to be put together: alone the Batch itself, else the bytes of `Columns`


def deal(sizes: Sequence[int], num_shares: int) -> list[range]:
    """Contiguous runs of items, one for each share, of about equal size.

    No share is larger than the mean by more than the largest item. If all sizes are 0, the first has everything.
    """
    ends = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])  # [items + 1]
    if ends[-1] == 0:
        return [range(len(sizes)), *[range(0)] * (num_shares - 1)]
    targets = ends[-1] * np.arange(1, num_shares) / num_shares
    after = np.searchsorted(ends, targets)  # the first end at or behind each target
    before = after - 1
    cuts = np.where(targets - ends[before] < ends[after] - targets, before, after)
    edges = [0, *cuts.tolist(), len(sizes)]
    return [range(first, end) for first, end in pairwise(edges)]


def own_share(claim: Any, ranks: Ranks) -> Any:
    """The claim with the groups alone whose payloads this rank fetches. Alike on all ranks, by the claim's headers.

    A claim of a recorded run has no headers: rank 0, which alone reads the record, has all of it.
    """
    if ranks.world_size == 1:
        return claim
    sizes = [sum(h["num_tokens"] for h in group.headers) for group in claim.groups]
    own = deal(sizes, ranks.world_size)[ranks.rank]
    return replace(claim, groups=claim.groups[own.start : own.stop])


def part_of(claim: Any, feed: Any, ranks: Ranks) -> Part:
    """This rank's part of a batch, fetched and decoded. Raises what `feed.fetch` raises."""
    samples = feed.fetch(own_share(claim, ranks))
    return make_batch(samples) if ranks.line is None else columns_of(samples).as_bytes()


def put_together(get: Callable[[], Part], ranks: Ranks) -> Batch:
    """The batch, from the parts that `get` returns on each rank. Raises on all ranks what `get` raises on one."""
    if ranks.line is None:
        batch: Batch = get()
        return batch
    return lay_out([Columns.from_bytes(part) for part in ranks.pool(get)])
