"""From samples to tensors.

All maths is `[batch, response]`: rows are samples in the order of their groups, columns response
tokens. Masks come from lengths and the sample's loss mask, never from token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.wire import Sample


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
    baselines: Tensor | None = None  # [batch]: score of the greedy sample of the row's group, if it has one (`remax`)
    reward_parts: tuple[dict[str, float], ...] = ()  # [batch]: parts of the score, as the reward function named them
    baseline_lengths: NDArray[np.int64] | None = None  # [batch]: tokens of its response

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[batch]: tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def to(self, device: torch.device) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)})

    def prompt(self, row: int) -> NDArray[np.int64]:
        return self.tokens[self.starts[row] : self.starts[row] + self.prompt_lengths[row]]

    def young(self, version: int, limit: int) -> Tensor:
        """[batch, response] bool: sampled tokens that are at most `limit` versions old at `version`; no other token
        carries loss weight."""
        return self.mask & (version - self.behavior_versions <= limit)

    def ages(self, version: int, *, limit: int | None = None) -> tuple[int, int]:
        """(smallest, largest) staleness at `version` of the sampled tokens, or of those `young` by `limit`."""
        versions = self.behavior_versions[self.mask if limit is None else self.young(version, limit)]
        if not versions.numel():
            return 0, 0
        newest, oldest = torch.stack([versions.amax(), versions.amin()]).tolist()
        return version - newest, version - oldest


def make_batch(samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> Batch:
    """Tensors of `samples`, which come group by group. Greedy samples are no rows, but the baselines of theirs."""
    greedy = {s.group: s for s in samples if s.sampling.get("temperature") == 0}
    samples = [s for s in samples if s.sampling.get("temperature") != 0]
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
        baselines=column([greedy[s.group].reward for s in samples], torch.float32) if greedy else None,
        reward_parts=tuple(s.reward_parts for s in samples),
        baseline_lengths=np.array([len(greedy[s.group].response_ids) for s in samples]) if greedy else None,
    )


def group_slices(batch: Batch, groups_per_slice: int) -> list[NDArray[np.int64]]:
    """Rows of each mini-batch: whole groups in their order, the last slice may be shorter."""
    ids = batch.group_ids.cpu().numpy()
    number = np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])  # [batch]: 0 for the first group, …
    slices = range(0, int(number[-1]) + 1, groups_per_slice)
    return [np.flatnonzero((number >= first) & (number < first + groups_per_slice)) for first in slices]
