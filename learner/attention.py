"""Our own attention, for what Hugging Face's does not do; the models call it through their interface.

*Varlen:* flash attention over the sequences of packed rows, without a [width, width] mask (GPUs, bfloat16).

*Ulysses:* the tokens of each row divided among ranks, which trade them for heads within attention. All else
works on one token at a time, so each of the n ranks keeps a range of columns of every row. Attention needs
whole rows but treats each head alone: an all-to-all turns [rows, heads, columns / n] into [rows, heads / n,
columns], and another one turns the result back (Jacobs et al. 2023, "DeepSpeed Ulysses"). Which tokens see
one another is read off the positions of the whole row, so packed rows, windows and shared prompts mean what
they mean on one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from common.errors import ConfigError
from learner.families import rope_types
from learner.packing import MicroBatch

NAME = "leeway_rows"
KEY = "actor.ulysses_sequence_parallel_size"
VARLEN = "model.attn_implementation=varlen"
Masks = dict[int | None, Tensor]  # by window: made by the first layer of a forward, shared by the others
FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")  # attend through `attention`


@dataclass(frozen=True, kw_only=True)
class SplitRows(MicroBatch):
    """A micro-batch of which this rank has a range of columns; `targets`, `temperatures`, `wanted` are of its own."""

    whole: MicroBatch
    own: Tensor  # [own tokens] int64: which of the micro-batch's tokens are computed here
    group: dist.ProcessGroup

    def gather(self, values: Tensor) -> Tensor:
        """[own tokens] → [tokens], on all ranks of the group. Backward keeps what is this rank's."""
        return _Everywhere.apply(values, self.own, len(self.whole.targets), self.group)

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[packed, heads, columns, head size] each → [packed, heads / n, width, head size] each, in one exchange."""
        n = self.group.size()
        blocks = [t.unflatten(1, (n, -1)).movedim(1, 0) for t in tensors]  # [n, packed, heads / n, columns, …]
        traded = _Exchange.apply(torch.cat(blocks, 2), self.group)  # from each rank its columns
        whole = traded.movedim(0, 2).flatten(2, 3)  # [packed, heads / n of all, width, …]
        return list(whole.split([b.shape[2] for b in blocks], 1))

    def to_columns(self, tensor: Tensor) -> Tensor:
        """The way back: [packed, heads / n, width, head size] → [packed, heads, columns, head size]."""
        blocks = tensor.unflatten(2, (self.group.size(), -1)).movedim(2, 0)
        return _Exchange.apply(blocks, self.group).movedim(0, 1).flatten(1, 2)


def split_rows(micro: MicroBatch, group: dist.ProcessGroup) -> SplitRows:
    """This rank's columns of `micro`, whose layout was made for as many ranks as `group` has."""
    n, rank = group.size(), group.rank()
    width = micro.input_ids.shape[1]
    columns = slice(rank * width // n, (rank + 1) * width // n)
    own = micro.parts[rank]
    row, column = micro.wanted[own] // width, micro.wanted[own] % width
    mine = {
        "input_ids": micro.input_ids[:, columns],
        "position_ids": micro.position_ids[:, columns],
        "wanted": row * (width // n) + column - columns.start,
        "targets": micro.targets[own],
        "temperatures": micro.temperatures[own],
    }
    shared = {f.name: getattr(micro, f.name) for f in fields(MicroBatch)}
    return SplitRows(**{**shared, **mine}, whole=micro, own=own, group=group)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float, sliding_window: int | None = None, softcap: float | None = None,
    rows: MicroBatch | None = None, varlen: bool = False, masks: Masks | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Hugging Face's attention interface: [packed, heads, columns, head size] → [packed, columns, heads, head size].

    rows: what is attended over; varlen: by flash attention, unless prompts are shared; masks: those that the layers
    before made in this forward. Without them (a plain forward of the same model) each row is one whole sequence.
    """
    masks = {} if masks is None else masks
    if not isinstance(rows, SplitRows):
        out = _attend(query, key, value, rows, varlen, masks, scaling, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    n = rows.group.size()
    copies = n // math.gcd(key.shape[1], n)  # fewer heads of keys and values than ranks: each gets a copy
    key, value = (t.repeat_interleave(copies, 1) for t in (key, value))
    query, key, value = rows.to_heads(query, key, value)
    out = _attend(query, key, value, rows.whole, varlen, masks, scaling, sliding_window, softcap)
    return rows.to_columns(out).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, rows: MicroBatch | None, varlen: bool, masks: Masks,
    scaling: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """[packed, heads, width, head size] each (keys and values may have fewer heads) → as `query`."""
    if varlen and rows is not None and not rows.shared:
        return _by_sequence(query, key, value, rows, scaling, window)
    mask = _mask(query, rows, window, masks)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap
    if mask is None:
        mask = causal_mask(torch.arange(query.shape[2], device=query.device).unsqueeze(0))
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(value.dtype) @ value


def _by_sequence(
    query: Tensor, key: Tensor, value: Tensor, rows: MicroBatch, scaling: float, window: int | None
) -> Tensor:
    """`_attend` by flash attention, each sequence (and each hole) of the rows on its own."""
    flat = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [packed · width, heads, head size] each
    left = -1 if window is None else window - 1
    out = varlen_attn(
        *flat, rows.boundaries, rows.boundaries, rows.longest, rows.longest, scale=scaling, window_size=(left, 0),
        enable_gqa=True,
    )  # fmt: skip
    return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2)


def _mask(query: Tensor, rows: MicroBatch | None, window: int | None, masks: Masks) -> Tensor | None:
    """[packed, 1, width, width] bool, or None for plain causal attention."""
    if rows is None:
        positions = torch.arange(query.shape[2], device=query.device).unsqueeze(0)
        return None if window is None else causal_mask(positions, window=window)
    if rows.alone and window is None:
        return None
    if window not in masks:
        shared = rows.attention_mask()  # no layer has a window then
        masks[window] = causal_mask(rows.position_ids, window=window) if shared is None else shared
    return masks[window]


def causal_mask(position_ids: Tensor, *, window: int | None = None) -> Tensor:
    """[packed, width] → [packed, 1, width, width] bool: a query sees itself and at most window − 1 tokens before it
    in its sequence. A sequence begins wherever positions do not go on counting."""
    begins = torch.diff(position_ids, dim=1, prepend=position_ids[:, :1] - 1) != 1
    sequence = begins.cumsum(1)
    width = position_ids.shape[1]
    seen = torch.ones(width, width, dtype=torch.bool, device=position_ids.device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return (seen & (sequence.unsqueeze(2) == sequence.unsqueeze(1))).unsqueeze(1)


def attend_by_rows(module: nn.Module, *, group: dist.ProcessGroup | None = None, varlen: bool = False) -> None:
    """Have a Hugging Face model call `attention`, which will be given rows.

    group: ranks among which their columns are divided; varlen: whether to attend by flash attention.
    Raises:
        ConfigError: naming the family, if it is not known to attend so or its heads do not divide.
    """
    from transformers import AttentionInterface

    n, config = group.size() if group is not None else 1, module.config.get_text_config()
    what, kind, heads = VARLEN if n == 1 else f"{KEY}={n}", config.model_type, config.num_attention_heads
    if kind not in FAMILIES or module.config is not config:
        raise ConfigError(
            f"{what}: models of type {kind!r} are not known to attend by rows of ours ({', '.join(FAMILIES)} are); "
            "leave it out"
        )
    if heads % n:
        raise ConfigError(f"{what}: this model of type {kind!r} has {heads} attention heads; take a divisor of them")
    if n > 1 and (found := {"dynamic", "longrope"} & rope_types(config)):
        raise ConfigError(
            f"{what}: positions of type {found.pop()!r} depend on the longest sequence, which no rank sees; set it to 1"
        )
    if varlen and getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"{VARLEN}: models of type {kind!r} cap their attention scores, which it does not; take sdpa")
    AttentionInterface.register(NAME, attention)
    module.config._attn_implementation = NAME


class _Exchange(torch.autograd.Function):
    """[n, …] → [n, …]: block i goes to rank i, block i of the result came from it. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        traded = torch.empty_like(blocks)
        dist.all_to_all_single(traded, blocks, group=group)
        return traded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class _Everywhere(torch.autograd.Function):
    """[own] → [total] on each rank of the group. All of them go on to the same loss, so that a rank's gradient is
    the part of it that is its own: summed over ranks, the parameters' gradients are those of one loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        everywhere = values.new_zeros(total)
        everywhere[own] = values
        dist.all_reduce(everywhere, group=group)
        return everywhere

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None
