"""The actor's weights as engines and `from_pretrained` get them, and the number that stands for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.adapters import is_adapter, sent_name
from learner.lora import adapter_parameters, gathered, merged_name, merged_parameters
from learner.model import DTYPES, Actor, reshard, shard_of


class PublishedWeights:
    """Hugging Face names and whole tensors in the served dtype, adapters merged or alone; a tied head is not listed.

    Iterating is collective. Each rank casts its shard, and what is gathered, one tensor at a time, is already in the
    served dtype. On one rank in float32 these are the parameters themselves: copy them before the next update.
    """

    def __init__(self, actor: Actor, *, dtype: str, adapters_only: bool = False) -> None:
        self._actor, self._dtype, self._adapters_only = actor, dtype, adapters_only

    def kinds(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each, from the model's description alone."""
        for name, p in self._actor.lm.named_parameters():
            if is_adapter(name) == self._adapters_only:
                yield sent_name(name) if self._adapters_only else merged_name(name), self._dtype, tuple(p.shape)

    def shards(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, this rank's rows in the served dtype, the parameter whose rows they are). Collective with adapters."""
        reshard(self._actor)
        lm = self._actor.lm
        for name, rows, p in adapter_parameters(lm) if self._adapters_only else merged_parameters(lm):
            yield name, rows.to(DTYPES[self._dtype]), p

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, rows, p in self.shards():
            yield name, gathered(rows, p)


def weights_digest(module: nn.Module) -> str:
    """16 hex digits that change with any bit of the weights; of those that are trained, if only some are."""
    reshard(module)
    return digest_of([p for p in module.parameters() if p.requires_grad] or list(module.parameters()))


@torch.no_grad()
def digest_of(parameters: list[nn.Parameter]) -> str:
    """A sum of words, each tensor with its own factor: the same number however many ranks share the weights.

    Each rank adds up its own shards, and one number is summed over the ranks that share a copy.
    """
    totals: dict[tuple[DeviceMesh, int] | None, Tensor] = {}
    for i, p in enumerate(parameters):
        local, among = shard_of(p.detach())
        words = local.contiguous().view(-1).view(torch.int16 if p.itemsize == 2 else torch.int32)
        total = totals.setdefault(among, torch.zeros((), dtype=torch.int64, device=local.device))
        total += (words.sum(dtype=torch.int64) * (2 * i + 1)).to(total.device)
    for among, total in totals.items():
        if among is not None:
            mesh, dim = among
            totals[among] = total = total.to(mesh.device_type)
            dist.all_reduce(total, group=mesh.get_group(dim))
    return f"{sum(int(t) for t in totals.values()) & 0xFFFF_FFFF_FFFF_FFFF:016x}"
