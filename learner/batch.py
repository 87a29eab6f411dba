"""From samples to tensors.

All maths is `[batch, response]`: rows are samples in the order of their groups, columns response
tokens. Masks come from lengths and the sample's loss mask, never from token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.wire import Sample
from learner.plain import pack, unpack


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
    baselines: Tensor | None = None  # [batch]: score of the greedy sample of the row's group, if it has one (`remax`)
    reward_parts: tuple[dict[str, float], ...] = ()  # [batch]: parts of the score, as the reward function named them
    baseline_lengths: NDArray[np.int64] | None = None  # [batch]: tokens of its response

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def host_mask(self) -> NDArray[np.bool_]:
        """`mask` where rows are laid out: the host waits for the device once a batch, not for each micro-batch."""
        return self.mask.cpu().numpy()

    @cached_property
    def host_group_ids(self) -> NDArray[np.int64]:
        return self.group_ids.cpu().numpy()

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


@dataclass(frozen=True)
class Columns:
    """Samples of whole groups as flat arrays: a batch, or the share of it that one rank has fetched."""

    prompt_lengths: NDArray[np.int64]  # [rows]
    response_lengths: NDArray[np.int64]  # [rows]
    tokens: NDArray[np.int32]  # [tokens]: every sequence, end to end
    loss_mask: NDArray[np.bool_]  # [response tokens], as are the next two
    behavior_logprobs: NDArray[np.float32]
    behavior_versions: NDArray[np.int64]
    scores: NDArray[np.float32]  # [rows], as are the next two
    group_ids: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    baselines: NDArray[np.float32]  # [rows]; [0] if no group has a greedy sample, as the next
    baseline_lengths: NDArray[np.int64]
    reward_parts: tuple[dict[str, float], ...]  # [rows]

    def as_bytes(self) -> NDArray[np.uint8]:
        """Number of rows and tokens and the reward's parts as msgpack, then the arrays."""
        arrays = [getattr(self, name) for name in _DTYPES]
        head = pack([[a.size for a in arrays], self.reward_parts])
        return np.frombuffer(b"".join([len(head).to_bytes(8, "little"), head, *arrays]), dtype=np.uint8)

    @classmethod
    def from_bytes(cls, data: NDArray[np.uint8]) -> Columns:
        at = 8 + int.from_bytes(data[:8].tobytes(), "little")
        sizes, parts = unpack(data[8:at].tobytes())
        arrays = {}
        for (name, dtype), size in zip(_DTYPES.items(), sizes, strict=True):
            arrays[name] = np.frombuffer(data, dtype=dtype, count=size, offset=at)
            at += arrays[name].nbytes
        return cls(**arrays, reward_parts=parts)


_DTYPES: dict[str, type] = {
    "prompt_lengths": np.int64, "response_lengths": np.int64, "tokens": np.int32, "loss_mask": np.bool_,
    "behavior_logprobs": np.float32, "behavior_versions": np.int64, "scores": np.float32, "group_ids": np.int64,
    "temperatures": np.float32, "baselines": np.float32, "baseline_lengths": np.int64,
}  # fmt: skip


def columns_of(samples: Sequence[Sample]) -> Columns:
    """Of `samples`, which come group by group. Greedy samples are no rows, but the baselines of theirs."""
    greedy = {s.group: s for s in samples if s.sampling.get("temperature") == 0}
    samples = [s for s in samples if s.sampling.get("temperature") != 0]
    values: dict[str, Iterable[Any]] = {
        "prompt_lengths": (len(s.prompt_ids) for s in samples),
        "response_lengths": (len(s.response_ids) for s in samples),
        "scores": (s.reward for s in samples),
        "group_ids": (s.group for s in samples),
        "temperatures": (s.sampling.get("temperature", 1.0) for s in samples),
        "baselines": (greedy[s.group].reward for s in samples if greedy),
        "baseline_lengths": (len(greedy[s.group].response_ids) for s in samples if greedy),
    }
    arrays: dict[str, Iterable[NDArray]] = {
        "tokens": (ids for s in samples for ids in (s.prompt_ids, s.response_ids)),
        "loss_mask": (s.loss_mask for s in samples),
        "behavior_logprobs": (s.behavior_logprobs for s in samples),
        "behavior_versions": (s.behavior_versions for s in samples),
    }
    return Columns(
        **{name: np.fromiter(column, dtype=_DTYPES[name]) for name, column in values.items()},
        **{name: _end_to_end(parts, _DTYPES[name]) for name, parts in arrays.items()},
        reward_parts=tuple(s.reward_parts for s in samples),
    )


def _end_to_end(arrays: Iterable[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays], dtype=dtype)


def lay_out(parts: Sequence[Columns], *, device: torch.device | str = "cpu") -> Batch:
    """The tensors of a batch, whose rows are those of `parts` one behind the other."""
    whole = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _DTYPES}
    response_lengths, lengths = whole["response_lengths"], whole["prompt_lengths"] + whole["response_lengths"]
    there = np.arange(response_lengths.max()) < response_lengths[:, None]  # [batch, response]

    def spread(name: str) -> Tensor:
        """One value per response token → [batch, response], 0 beyond the end of a row."""
        full = np.zeros(there.shape, dtype=_DTYPES[name])
        full[there] = whole[name]
        return torch.from_numpy(full).to(device)

    def column(name: str) -> Tensor:
        return torch.from_numpy(whole[name]).to(device)

    has_baselines = len(whole["baselines"]) > 0
    return Batch(
        tokens=whole["tokens"].astype(np.int64),
        starts=np.cumsum(lengths) - lengths,
        prompt_lengths=whole["prompt_lengths"],
        response_lengths=response_lengths,
        mask=spread("loss_mask"),
        behavior_logprobs=spread("behavior_logprobs"),
        behavior_versions=spread("behavior_versions"),
        scores=column("scores"),
        group_ids=column("group_ids"),
        temperatures=column("temperatures"),
        baselines=column("baselines") if has_baselines else None,
        reward_parts=tuple(parts_of for p in parts for parts_of in p.reward_parts),
        baseline_lengths=whole["baseline_lengths"] if has_baselines else None,
    )


def make_batch(samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> Batch:
    """Tensors of `samples`, which come group by group."""
    return lay_out([columns_of(samples)], device=device)


def group_slices(batch: Batch, groups_per_slice: int) -> list[NDArray[np.int64]]:
    """Rows of each mini-batch: whole groups in their order, the last slice may be shorter."""
    ids = batch.host_group_ids
    number = np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])  # [batch]: 0 for the first group, …
    slices = range(0, int(number[-1]) + 1, groups_per_slice)
    return [np.flatnonzero((number >= first) & (number < first + groups_per_slice)) for first in slices]
