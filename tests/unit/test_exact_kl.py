"""`actor.kl_loss_type=full`: the KL over the whole vocabulary, against logits of each sequence alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import logprobs, model, resume
from learner.batch import Batch, make_batch
from learner.exact_kl import exact_kl
from learner.model import Actor, load_actor
from learner.models import load_models
from learner.packing import Packing, micro_batches
from learner.served import PublishedWeights
from tests.learner_parts import SimulatedFeed, alone, initial_weights, make_config, make_groups, make_learner
from tests.models import tiny_model

FULL = ("actor.kl_loss_type=full", "actor.ppo_mini_batch_size=4")


def naive_kl(lm: Any, ref: Any, batch: Batch) -> torch.Tensor:
    """[batch, response], 0 where nothing was sampled; one sequence at a time, all logits at once."""
    out = torch.zeros(batch.mask.shape, dtype=next(lm.parameters()).dtype)
    for row in range(len(batch)):
        start, length, prompt = batch.starts[row], batch.lengths[row], batch.prompt_lengths[row]
        ids = torch.from_numpy(np.asarray(batch.tokens[start : start + length], dtype=np.int64)).unsqueeze(0)
        ours, theirs = (
            (m(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1] / batch.temperatures[row]).log_softmax(-1)
            for m in (lm, ref)
        )
        kl = (ours.exp() * (ours - theirs.detach())).sum(-1)
        out = out.index_put((torch.tensor(row), torch.arange(len(kl))), kl)
    return out.masked_fill(~batch.mask, 0)


@pytest.mark.parametrize(
    "packing", [Packing(4096), Packing(60, share_prompts=False), Packing(60, packed=False)],
    ids=["prompts shared", "packed", "padded"],
)  # fmt: skip
def test_value_and_gradient_are_those_of_whole_logits(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, three tokens a chunk, each sample at a temperature of its own."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * 42)
    samples = make_groups(make_config(), 5)
    samples = [
        dataclasses.replace(
            s, prompt_ids=s.prompt_ids % 42, response_ids=s.response_ids % 42,
            sampling={**s.sampling, "temperature": 0.6 + 0.1 * s.index},
        )
        for s in samples
    ]  # fmt: skip
    batch = make_batch(samples)
    actor, reference = (Actor(tiny_model(seed).double()) for seed in (1, 2))
    kl = naive_kl(actor.lm, reference.lm, batch)
    weight = torch.randn(kl.shape, dtype=kl.dtype, generator=torch.Generator().manual_seed(0))
    (weight * kl).sum().backward()
    expected = {n: p.grad for n, p in actor.named_parameters()}
    actor.zero_grad()
    ours = torch.zeros_like(kl)
    with exact_kl(make_config(*FULL), reference) as besides:
        assert besides is not None
        for micro in micro_batches(batch, np.arange(len(batch)), packing):
            _, _, token_kl = actor(micro, beside=besides(micro))
            part = micro.scatter(token_kl)
            (weight[micro.rows] * part).sum().backward()
            ours[micro.rows] = part.detach()
    assert kl[batch.mask].min() > 0.1, "far apart"
    assert (ours - kl).abs().max() <= 1e-6 * kl.abs().max()
    for name, p in actor.named_parameters():
        assert (p.grad - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max(), name
    assert all(p.grad is None for p in reference.parameters())


def test_the_head_is_cast_before_it_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks: `rank_program.gathered_as_computed`."""
    config = make_config(*FULL, "model.dtype=bfloat16")
    reference = load_models(config, initial_weights(tmp_path, config), alone()).reference
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(model, "gathered", lambda rows, _: seen.append(rows) or rows)
    with exact_kl(config, reference) as besides:
        batch = make_batch(make_groups(config, 1))
        micro = micro_batches(batch, np.arange(len(batch)), Packing(4096))[0]
        beside = besides(micro)
        logits = beside.head(beside.hidden)
    assert [t.dtype for t in seen] == [torch.bfloat16] and beside.hidden.dtype == torch.bfloat16
    assert torch.equal(logits, beside.hidden @ seen[0].T)


@pytest.mark.parametrize("options", [(), ("model.lora_rank=4", "actor.optim.lr=1e-2")], ids=["reference", "adapters"])
def test_a_step_has_the_exact_kl_in_its_loss(options: tuple[str, ...], tmp_path: Path) -> None:
    """To the initial weights, which with adapters are the actor's own. There is no pass of the reference before it."""
    config = make_config(*FULL, "actor.kl_loss_coef=0.5", *options)
    folder = initial_weights(tmp_path / "model", config)
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
    learner = make_learner(config, load_models(config, folder, alone()), feed, tmp_path / "run")
    resume.resume(learner, feed.attach())
    learner.step()
    plain = load_actor(folder)
    reference = load_actor(folder).lm
    plain.lm.load_state_dict(dict(PublishedWeights(learner.models.actor.module, dtype="float32")), strict=False)
    learner.step()
    batch = make_batch(make_groups(config, 2, version=1))
    with torch.no_grad():
        kl = naive_kl(plain.lm, reference, batch)
    line = learner.writer.lines[2]
    assert line["actor/kl_loss"] == pytest.approx(kl[batch.mask].mean().item(), rel=1e-3)
    assert line["actor/kl_loss"] > 1e-6
    assert "timing_s/ref" not in line and line["timing_s/update_actor"] > 0
