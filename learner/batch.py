"""From samples to tensors, and from tensors to packed rows for a model's forward.

All maths is `[batch, response]`: rows are samples in the order of their groups, columns response
tokens. Only a model's forward sees *packed rows*: sequences (prompt + response) end to end, with
position ids that restart at 0 for each.

The off-by-one, here and nowhere else: the model's output at position p speaks of the token at
p + 1. What is wanted for response token t of a sequence with prompt length P, which lies at
position P + t, is therefore read at position P + t − 1.

Masks come from lengths and the sample's loss mask, never from token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.wire import Sample

GOOD_FILL = 0.97  # packed rows this full are not packed into wider ones


@dataclass(frozen=True)
class Batch:
    """The samples of one step. Example shapes: 64 groups of 8 are a batch of 512."""

    tokens: NDArray[np.int64]  # [total]: every sequence, end to end
    starts: NDArray[np.int64]  # [batch]: where each begins in `tokens`
    prompt_lengths: NDArray[np.int64]  # [batch]
    response_lengths: NDArray[np.int64]  # [batch]
    mask: Tensor  # [batch, response] bool: tokens that the policy sampled (the *sampled* mask)
    behavior_logprobs: Tensor  # [batch, response] float32
    behavior_versions: Tensor  # [batch, response] int64
    scores: Tensor  # [batch] float32
    group_ids: Tensor  # [batch] int64
    temperatures: Tensor  # [batch] float32
    truncated: Tensor  # [batch] bool: ended by length

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[batch]: tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def ages(self, version: int) -> tuple[int, int]:
        """(smallest, largest) staleness at `version` of the tokens that carry loss weight."""
        versions = self.behavior_versions[self.mask]
        if not versions.numel():
            return 0, 0
        newest, oldest = torch.stack([versions.amax(), versions.amin()]).tolist()
        return version - newest, version - oldest


def make_batch(samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> Batch:
    """Tensors of `samples`, which come group by group."""
    prompt_lengths = np.array([len(s.prompt_ids) for s in samples], dtype=np.int64)
    response_lengths = np.array([len(s.response_ids) for s in samples], dtype=np.int64)
    tokens = np.concatenate([ids for s in samples for ids in (s.prompt_ids, s.response_ids)]).astype(np.int64)
    lengths = prompt_lengths + response_lengths
    there = np.arange(response_lengths.max()) < response_lengths[:, None]  # [batch, response]

    def spread(parts: list[NDArray], dtype: type) -> Tensor:
        """One array per sample → [batch, response], 0 beyond its end."""
        full = np.zeros(there.shape, dtype=dtype)
        full[there] = np.concatenate(parts)
        return torch.from_numpy(full).to(device)

    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        tokens=tokens,
        starts=np.cumsum(lengths) - lengths,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        mask=spread([s.loss_mask for s in samples], np.bool_),
        behavior_logprobs=spread([s.behavior_logprobs for s in samples], np.float32),
        behavior_versions=spread([s.behavior_versions for s in samples], np.int64),
        scores=column([s.reward for s in samples], torch.float32),
        group_ids=column([s.group for s in samples], torch.int64),
        temperatures=column([s.sampling.get("temperature", 1.0) for s in samples], torch.float32),
        truncated=column([s.finish_reason == "length" for s in samples], torch.bool),
    )


def group_slices(batch: Batch, groups_per_slice: int) -> list[NDArray[np.int64]]:
    """Rows of each mini-batch: whole groups in their order, the last slice may be shorter."""
    ids = batch.group_ids.cpu().numpy()
    number = np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])  # [batch]: 0 for the first group, …
    slices = range(0, int(number[-1]) + 1, groups_per_slice)
    return [np.flatnonzero((number >= first) & (number < first + groups_per_slice)) for first in slices]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward sees, and where its results belong."""

    rows: Tensor  # [n] int64: rows of the batch
    input_ids: Tensor  # [packed, width] int64
    position_ids: Tensor  # [packed, width] int64, restarting
    wanted: Tensor  # [tokens] int64: index into the flattened input, the position *before* each target
    targets: Tensor  # [tokens] int64
    temperatures: Tensor  # [tokens] float32
    place: Tensor  # [tokens] int64: index of each target into the flattened [n, response]
    width: int  # columns of [batch, response]

    def scatter(self, values: Tensor) -> Tensor:
        """[tokens] → [n, response], 0 where no token was sampled. Differentiable."""
        out = values.new_zeros(len(self.rows) * self.width)
        return out.index_put((self.place,), values).view(len(self.rows), self.width)


def micro_batches(
    batch: Batch, rows: NDArray[np.int64], *, token_budget: int | None, rows_per_batch: int = 1
) -> list[MicroBatch]:
    """Packed rows of `rows`, as many to a forward as fit into `token_budget` tokens.

    Packed rows are as wide as the longest sequence, or wider (up to the budget) where that leaves
    fewer holes: attention costs a token as much as its packed row is wide.
    `token_budget=None`: `rows_per_batch` sequences to a forward instead.
    """
    if token_budget is None:
        lots = [rows[i : i + rows_per_batch] for i in range(0, len(rows), rows_per_batch)]
        return [_micro_batch(batch, lot, *_one_per_row(batch.lengths[lot])) for lot in lots]
    bins, width = pack(batch.lengths[rows], token_budget)
    per_forward = max(1, token_budget // width)
    result = []
    for first in range(0, int(bins.max()) + 1, per_forward):
        here = np.flatnonzero((bins >= first) & (bins < first + per_forward))
        result.append(_micro_batch(batch, rows[here], bins[here] - first, width))
    return result


def pack(lengths: NDArray[np.int64], token_budget: int) -> tuple[NDArray[np.int64], int]:
    """First-fit decreasing: the packed row of each sequence, and the width of packed rows.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    longest, total = int(lengths.max()), int(lengths.sum())
    if longest > token_budget:
        raise ValueError(f"a sequence of {longest} tokens does not fit into {token_budget}")
    best: tuple[int, NDArray[np.int64], int] | None = None
    width = longest
    while True:
        bins = _first_fit_decreasing(lengths, width)
        used = (int(bins.max()) + 1) * width
        if best is None or used < best[0]:
            best = (used, bins, width)
        if total >= GOOD_FILL * used or width * 2 > min(token_budget, 4 * longest):
            return best[1], best[2]
        width *= 2


def _first_fit_decreasing(lengths: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    bins = np.empty(len(lengths), dtype=np.int64)
    space = np.full(len(lengths), width, dtype=np.int64)  # of each bin
    first_open = 0  # bins before it cannot even take the shortest
    shortest = int(lengths.min())
    for i in np.argsort(-lengths, kind="stable"):
        while space[first_open] < shortest:
            first_open += 1
        chosen = first_open + int(np.argmax(space[first_open:] >= lengths[i]))
        bins[i] = chosen
        space[chosen] -= lengths[i]
    return bins


def _one_per_row(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    return np.arange(len(lengths)), int(lengths.max())


def _micro_batch(batch: Batch, rows: NDArray[np.int64], bins: NDArray[np.int64], width: int) -> MicroBatch:
    """Lay sequence i of `rows` into packed row `bins[i]`, behind those laid there before it.

    Holes are at the ends of packed rows. They go on counting positions from the sequence before
    them (as far as there are positions), which, attention being causal, cannot see them.
    """
    order = np.argsort(bins, kind="stable")
    rows, bins = rows[order], bins[order]
    lengths = batch.lengths[rows]  # [n]
    ends = np.cumsum(lengths)
    first_of_bin = np.searchsorted(bins, bins)  # [n]: the first sequence of its packed row
    offsets = (ends - lengths) - (ends - lengths)[first_of_bin]  # [n]: where it begins in its packed row
    begins = bins * width + offsets  # [n]: … in the flattened input
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)  # [total]: 0, 1, … in each sequence

    num_packed = int(bins[-1]) + 1
    flat = np.repeat(begins, lengths) + within  # [total]
    input_ids = np.zeros(num_packed * width, dtype=np.int64)
    input_ids[flat] = batch.tokens[np.repeat(batch.starts[rows], lengths) + within]
    columns = np.arange(width)
    position_ids = np.empty((num_packed, width), dtype=np.int64)
    last_of_bin = np.searchsorted(bins, np.arange(num_packed), side="right") - 1
    position_ids[:] = np.minimum(columns - offsets[last_of_bin][:, None], lengths.max() - 1)
    position_ids.reshape(-1)[flat] = within

    device = batch.mask.device
    to_rows = torch.from_numpy(rows).to(device)
    row, column = (x.cpu().numpy() for x in batch.mask[to_rows].nonzero(as_tuple=True))  # [tokens] each
    at = begins[row] + batch.prompt_lengths[rows][row] + column  # where the target itself lies

    def send(array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        rows=to_rows,
        input_ids=send(input_ids).view(num_packed, width),
        position_ids=send(position_ids),
        wanted=send(at - 1),
        targets=send(input_ids[at]),
        temperatures=batch.temperatures[to_rows][torch.from_numpy(row).to(device)],
        place=send(row * batch.mask.shape[1] + column),
        width=batch.mask.shape[1],
    )
