"""Our own attention over packed rows is Hugging Face's, in every family."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from learner import attention
from learner.attention import attend_by_rows, causal_mask
from learner.batch import make_batch
from learner.model import load_actor
from learner.models import load_models
from learner.packing import Packing, micro_batches
from learner.sharding import checkpoint_activations
from tests.families import FAMILIES, write_family
from tests.learner_parts import alone, initial_weights, make_config, make_groups


def simulated_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, key_begins: Tensor, longest: int, longest_key: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn`, which needs a GPU, as its documentation says: a loop over sequences."""
    assert (begins.dtype, enable_gqa, window_size[1]) == (torch.int32, True, 0)
    assert int(begins.diff().max()) == longest == longest_key
    out = []
    for first, end in zip(begins.tolist(), begins.tolist()[1:], strict=False):
        q, k, v = (t[first:end].transpose(0, 1) for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
        seen = torch.ones(end - first, end - first, dtype=torch.bool).tril()
        if window_size[0] != -1:
            seen = seen.triu(-window_size[0])
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("varlen", [False, True], ids=["masks", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_by_rows_is_the_models_own(
    family: str, varlen: bool, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", simulated_varlen_attn)
    folder = write_family(tmp_path, family)
    ours, theirs = load_actor(folder), load_actor(folder)
    if varlen and family == "gemma2":
        with pytest.raises(ConfigError, match="models of type 'gemma2' cap their attention scores"):
            attend_by_rows(ours.lm, varlen=True)
        return
    attend_by_rows(ours.lm, varlen=varlen)
    ours.varlen = varlen
    batch = make_batch(make_groups(make_config(), 1))
    share = packed and not varlen and theirs.shares_prompts
    packing = Packing(60, packed=packed, share_prompts=share, hidden_size=64)
    for micro in micro_batches(batch, np.arange(len(batch)), packing):
        a, b = ours(micro)[0], theirs(micro)[0]
        assert (a - b).abs().max() <= 1e-5
        a.sum().backward()
        b.sum().backward()
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), name
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():  # a plain forward of the same model
        assert torch.allclose(ours.lm(ids, use_cache=False).logits, theirs.lm(ids, use_cache=False).logits, atol=1e-5)


def test_a_query_sees_its_own_sequence_and_not_beyond_its_window() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    seen = causal_mask(positions)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5]]
    seen = causal_mask(positions, window=2)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[0], [0, 1], [1, 2], [3], [3, 4], [5]]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_mask_is_made_once_a_forward_and_goes_with_it(
    recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers share it, those that are computed again too; nothing of it outlives the backward pass."""
    made: list[weakref.ref[Tensor]] = []

    def watched(positions: Tensor, *, window: int | None = None) -> Tensor:
        mask = causal_mask(positions, window=window)
        made.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(attention, "causal_mask", watched)
    actor = load_actor(write_family(tmp_path, "llama tied"))
    attend_by_rows(actor.lm)
    if recompute:
        checkpoint_activations(actor)
    batch = make_batch(make_groups(make_config(), 1))
    micros = micro_batches(batch, np.arange(len(batch)), Packing(60, share_prompts=False, hidden_size=10_000))
    packed = [m for m in micros if not m.alone]
    assert len(packed) >= 2
    for micro in packed:
        actor(micro)[0].sum().backward()
    with torch.no_grad():
        actor(packed[0])
    assert len(made) == len(packed) + 1
    gc.collect()
    assert [m() for m in made] == [None] * len(made)


def test_flash_attention_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    config = make_config("model.attn_implementation=varlen", "model.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"model.attn_implementation=varlen: flash attention needs a GPU"):
        load_models(config, initial_weights(tmp_path, config), alone())
