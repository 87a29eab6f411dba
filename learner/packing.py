"""From rows of a batch to what one forward sees, and back.

Only a model's forward sees *packed rows*: sequences end to end, with positions that restart at 0
for each and no attention from one to another. Where it is cheaper the samples of a group share
their prompt: the prompt stands once, and each response behind it goes on counting from there and
sees the prompt and itself. Either way the numbers are those of each sequence alone, as they are in
*padded rows* of one sequence each.

The off-by-one, here and nowhere else: the model's output at position p speaks of the token at
p + 1. What is wanted for response token t of a sequence with prompt length P, which lies at
position P + t, is therefore read at position P + t − 1. The last token of a sequence is only ever
a target, so it is not laid out at all.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.batch import Batch

MAX_SHARED_WIDTH = 4096  # tokens of a prompt and what is behind it: the mask of a row has width² elements
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """How rows are laid out."""

    token_budget: int | None  # of one forward; None: `rows_per_forward` sequences instead
    rows_per_forward: int = 1
    packed: bool = True  # False: one sequence a row
    share_prompts: bool = True  # in packed rows under a token budget
    hidden_size: int = 1024  # of the model
    split: int = 1  # ranks among which the columns of each row are divided; widths are multiples of it

    def cost(self, width: int) -> float:
        """Work per token in packed rows of `width`, in units of the work that does not depend on it.

        A layer multiplies a token with about 12 h² weights, and with `width` keys and values of h each.
        """
        return 1 + width / (6 * self.hidden_size)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward sees, and where its results belong."""

    rows: Tensor  # [n] int64: rows of the batch
    input_ids: Tensor  # [packed, width] int64
    position_ids: Tensor  # [packed, width] int64, restarting
    trees: Tensor | None  # [packed, width] int32 where prompts are shared: which prompt; -1: a hole
    branches: Tensor | None  # [packed, width] int32: 0 in the prompt, else the number of the response
    wanted: Tensor  # [tokens] int64: index into the flattened input, the position *before* each target
    targets: Tensor  # [tokens] int64
    temperatures: Tensor  # [tokens] float32
    place: Tensor  # [tokens] int64: index of each target into the flattened [n, response]
    num_columns: int  # of [batch, response]
    alone: bool  # each row holds one sequence
    boundaries: Tensor  # [segments + 1] int32: where sequences and holes begin in the flattened input, and its end
    longest: int  # of the segments
    parts: tuple[Tensor, ...]  # [split]: which tokens are read in each range of columns

    @property
    def shared(self) -> bool:
        """Whether some prompt stands once for several responses."""
        return self.trees is not None

    def attention_mask(self) -> Tensor | None:
        """[packed, 1, width, width] bool where prompts are shared. Large: made anew by each forward."""
        return None if self.trees is None or self.branches is None else _mask(self.trees, self.branches)

    def gather(self, values: Tensor) -> Tensor:
        """[tokens computed here] → [tokens]."""
        return values

    def scatter(self, values: Tensor) -> Tensor:
        """[tokens] → [n, response], 0 where no token was sampled. Differentiable."""
        out = values.new_zeros(len(self.rows) * self.num_columns)
        return out.index_put((self.place,), values).view(len(self.rows), self.num_columns)


@dataclass(frozen=True)
class Units:
    """Sequences, or responses behind one prompt, that must lie together. In the order of `rows`."""

    rows: Ints  # [n]
    unit: Ints  # [n]: ascending
    lengths: Ints  # [units]: tokens laid out

    @property
    def shared(self) -> bool:
        return len(self.lengths) < len(self.rows)


def micro_batches(
    batch: Batch, rows: Ints, packing: Packing, *, rank: int = 0, world_size: int = 1
) -> list[MicroBatch]:
    """This rank's share of `rows` of the batch, laid out for as few forwards as fit into the budget.

    All ranks take the same number of forwards; one that has fewer gets empty micro-batches.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    plans = [_forwards(units, packing) for units in shares(batch, rows, packing, world_size)]
    num_forwards = max(len(plan) for plan in plans)
    mine = [_lay_out(batch, units, bins, packing.split) for units, bins in plans[rank]]
    return mine + [_nothing(batch, packing.split)] * (num_forwards - len(mine))


def shares(batch: Batch, rows: Ints, packing: Packing, world_size: int) -> list[Units]:
    """`rows` of each rank: the costliest unit first, each to the rank that has least to do so far."""
    units = _units(batch, rows, packing)
    if world_size == 1:
        return [units]
    owner = np.empty(len(units.lengths), dtype=np.int64)
    loads = [(0.0, rank) for rank in range(world_size)]
    for i in np.argsort(-units.lengths, kind="stable"):
        load, owner[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + units.lengths[i] * packing.cost(int(units.lengths[i])), int(owner[i])))
    return [_some(units, owner == rank) for rank in range(world_size)]


def _forwards(units: Units, packing: Packing) -> list[tuple[Units, Ints]]:
    """(units, row of each) of every forward of one rank."""
    if not len(units.lengths):
        return []
    number, row = (_by_budget if packing.token_budget is not None else _by_count)(units.lengths, packing)
    return [(_some(units, number == i), row[number == i]) for i in range(int(number.max()) + 1)]


def _by_budget(lengths: Ints, packing: Packing) -> tuple[Ints, Ints]:
    """(forward, row in it) of each unit: rows × width within the token budget."""
    if packing.packed:
        bins, width = pack(lengths, packing)
        per_forward = max(1, packing.token_budget // width)
        return bins // per_forward, bins % per_forward
    number, row = np.empty_like(lengths), np.empty_like(lengths)
    order, first, forward = np.argsort(-lengths, kind="stable"), 0, 0
    while first < len(order):  # the longest that are left, as many as fit padded to the first of them
        here = order[first : first + packing.token_budget // _fitting(int(lengths[order[first]]), packing)]
        number[here], row[here] = forward, np.arange(len(here))
        first, forward = first + len(here), forward + 1
    return number, row


def _by_count(lengths: Ints, packing: Packing) -> tuple[Ints, Ints]:
    """(forward, row in it) of each unit: `rows_per_forward` sequences a forward, in their order."""
    number, row = np.divmod(np.arange(len(lengths)), packing.rows_per_forward)
    if packing.packed:
        for i in range(int(number[-1]) + 1):
            here = number == i
            row[here], _ = pack(lengths[here], replace(packing, token_budget=int(lengths[here].sum())))
    return number, row


def pack(lengths: Ints, packing: Packing) -> tuple[Ints, int]:
    """First-fit decreasing: the packed row of each unit, and the width of packed rows.

    As wide as the longest unit, or twice or four times that where fewer holes outweigh the attention.
    """
    longest, budget = int(lengths.max()), packing.token_budget or int(lengths.max())
    _fitting(longest, packing)
    tries = []
    for width in (longest, 2 * longest, 4 * longest):
        if width <= budget:
            bins = _first_fit_decreasing(lengths, width)
            tries.append(((int(bins.max()) + 1) * width * packing.cost(width), bins, width))
    _, bins, width = min(tries, key=lambda t: t[0])
    return bins, width


def _fitting(length: int, packing: Packing) -> int:
    if packing.token_budget is not None and length > packing.token_budget:
        raise ValueError(f"{length} tokens do not fit into {packing.token_budget}")
    return length


def _first_fit_decreasing(lengths: Ints, width: int) -> Ints:
    bins = np.empty(len(lengths), dtype=np.int64)
    space = np.full(len(lengths), width, dtype=np.int64)  # of each bin
    first_open, shortest = 0, int(lengths.min())
    for i in np.argsort(-lengths, kind="stable"):
        while space[first_open] < shortest:
            first_open += 1
        chosen = first_open + int(np.argmax(space[first_open:] >= lengths[i]))
        bins[i] = chosen
        space[chosen] -= lengths[i]
    return bins


# ---------------------------------------------------------------- units
def _alone(batch: Batch, rows: Ints) -> Units:
    return Units(rows, np.arange(len(rows)), batch.lengths[rows] - 1)


def _units(batch: Batch, rows: Ints, packing: Packing) -> Units:
    """The samples of a group behind one prompt where that is less work, else each sequence alone."""
    if not packing.share_prompts or not packing.packed or packing.token_budget is None:
        return _alone(batch, rows)
    limit = min(packing.token_budget, MAX_SHARED_WIDTH)
    unit, lengths = np.empty(len(rows), dtype=np.int64), []
    for first, end in _same_prompt(batch, rows):
        prompt = int(batch.prompt_lengths[rows[first]])
        responses = batch.response_lengths[rows[first:end]] - 1
        together, alone = prompt + int(responses.sum()), prompt + responses
        share = together <= limit and together * packing.cost(together) < sum(
            length * packing.cost(int(length)) for length in alone
        )
        unit[first:end] = len(lengths) + (0 if share else np.arange(end - first))
        lengths += [together] if share else alone.tolist()
    return Units(rows, unit, np.array(lengths, dtype=np.int64))


def _same_prompt(batch: Batch, rows: Ints) -> list[tuple[int, int]]:
    """Runs of neighbours in `rows` that have the same group and the same prompt, as [first, end)."""
    groups = batch.host_group_ids[rows]
    edges = [0]
    for i in range(1, len(rows)):
        if groups[i] != groups[i - 1] or not np.array_equal(batch.prompt(rows[i]), batch.prompt(rows[i - 1])):
            edges.append(i)
    return list(zip(edges, [*edges[1:], len(rows)], strict=True))


def _some(units: Units, here: NDArray[np.bool_]) -> Units:
    """The units where `here` is true, numbered anew."""
    chosen = here[units.unit]
    number = np.cumsum(here) - 1
    return Units(units.rows[chosen], number[units.unit[chosen]], units.lengths[here])


# ---------------------------------------------------------------- layout
def _nothing(batch: Batch, split: int) -> MicroBatch:
    """A forward of one token a rank that nothing is asked of: this rank's part in the others' collectives."""
    device = batch.mask.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    one = torch.arange(split, device=device).unsqueeze(0)
    return MicroBatch(
        rows=none, input_ids=one, position_ids=one, trees=None, branches=None, wanted=none, targets=none,
        temperatures=batch.temperatures[:0], place=none, num_columns=batch.mask.shape[1], alone=True,
        boundaries=torch.tensor([0, split], dtype=torch.int32, device=device), longest=split, parts=(none,) * split,
    )  # fmt: skip


def _lay_out(batch: Batch, units: Units, bins: Ints, split: int) -> MicroBatch:
    """Lay each unit into packed row `bins[unit]`, behind those laid there before it."""
    rows, unit = units.rows, units.unit
    width, num_packed = int(np.bincount(bins, weights=units.lengths).max()), int(bins.max()) + 1
    width += -width % split
    begins = bins * width + _offsets(bins, units.lengths)  # [units]: in the flattened input
    heads = np.flatnonzero(np.diff(unit, prepend=-1))  # [units]: first row of each
    prompts = batch.prompt_lengths[rows]  # [n]
    responses = batch.response_lengths[rows] - 1  # [n]: laid out
    response_begins = begins[unit] + prompts + _offsets(unit, responses)  # [n]

    input_ids = np.zeros(num_packed * width, dtype=np.int64)
    columns = np.arange(num_packed * width, dtype=np.int64) % width
    position_ids = np.where(columns < units.lengths.max(), columns, 0)  # in holes: anything the model has
    trees = np.full(num_packed * width, -1, dtype=np.int32)  # unit that a position belongs to; holes: none
    branches = np.zeros(num_packed * width, dtype=np.int32)  # 0: prompt, i + 1: response of rows[i]
    for at, tokens_at, position, owner, branch, lengths in (
        (begins, batch.starts[rows[heads]], np.zeros_like(begins), np.arange(len(begins)), np.zeros_like(begins),
         prompts[heads]),
        (response_begins, batch.starts[rows] + prompts, prompts, unit, np.arange(1, len(rows) + 1), responses),
    ):  # fmt: skip
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        flat = np.repeat(at, lengths) + within
        input_ids[flat] = batch.tokens[np.repeat(tokens_at, lengths) + within]
        position_ids[flat] = np.repeat(position, lengths) + within
        trees[flat] = np.repeat(owner, lengths)
        branches[flat] = np.repeat(branch, lengths)

    boundaries = np.unique(np.concatenate([begins, begins + units.lengths, np.arange(num_packed + 1) * width]))

    device = batch.mask.device
    to_rows = torch.from_numpy(rows).to(device)
    row, column = np.nonzero(batch.host_mask[rows])  # [tokens] each
    before_first = begins[unit] + prompts - 1  # [n]: the last prompt token
    wanted = np.where(column == 0, before_first[row], response_begins[row] + column - 1)
    targets = batch.tokens[batch.starts[rows][row] + prompts[row] + column]

    def send(array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        rows=to_rows,
        input_ids=send(input_ids).view(num_packed, width),
        position_ids=send(position_ids).view(num_packed, width),
        trees=send(trees).view(num_packed, width) if units.shared else None,
        branches=send(branches).view(num_packed, width) if units.shared else None,
        wanted=send(wanted),
        targets=send(targets),
        temperatures=batch.temperatures[to_rows][send(row)],
        place=send(row * batch.mask.shape[1] + column),
        num_columns=batch.mask.shape[1],
        alone=len(bins) == num_packed and not units.shared,
        boundaries=send(boundaries.astype(np.int32)),
        longest=int(np.diff(boundaries).max()),
        parts=tuple(send(np.flatnonzero(wanted % width * split // width == part)) for part in range(split)),
    )


def _offsets(bins: Ints, lengths: Ints) -> Ints:
    """Where each item begins in its bin, the items of a bin lying one behind the other in their order."""
    order = np.argsort(bins, kind="stable")
    ends = np.cumsum(lengths[order])
    begins = ends - lengths[order]
    offsets = np.empty_like(begins)
    offsets[order] = begins - begins[np.searchsorted(bins[order], bins[order])]
    return offsets


def _mask(trees: Tensor, branches: Tensor) -> Tensor:
    """[packed, width] each → [packed, 1, width, width]: a query sees earlier keys of its prompt and of itself."""
    width = trees.shape[1]
    earlier = torch.ones(width, width, dtype=torch.bool, device=trees.device).tril()
    query, key = branches.unsqueeze(2), branches.unsqueeze(1)
    same_tree = trees.unsqueeze(2) == trees.unsqueeze(1)
    return (earlier & same_tree & ((key == 0) | (key == query))).unsqueeze(1)
