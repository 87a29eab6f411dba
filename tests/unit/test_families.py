"""Families of models at some 100,000 random parameters: two steps of training, whole and packed alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from learner import resume
from learner.batch import make_batch
from learner.families import refuse_moving_positions
from learner.model import load_actor
from learner.models import load_models
from learner.packing import Packing, micro_batches
from learner.served import weights_digest
from tests.families import FAMILIES, SMALL, write_family
from tests.learner_parts import SimulatedFeed, alone, make_config, make_groups, make_learner


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: write_family(tmp_path / "model", family)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_the_models_own_logprobs_and_two_steps_train(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, config = folder_of(family), make_config("trainer.save_freq=1")
    samples = make_groups(config, 1)
    batch = make_batch(samples)
    actor = load_actor(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    packing = Packing(96, share_prompts=actor.shares_prompts, hidden_size=64)
    with torch.no_grad():
        for micro in micro_batches(batch, np.arange(len(batch)), packing):
            ours = micro.scatter(actor(micro)[0])
            for i, row in enumerate(micro.rows.tolist()):
                s = samples[row]
                ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64))
                theirs = lm(input_ids=ids[None], use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1].log_softmax(-1)
                chosen = theirs.gather(-1, ids[len(s.prompt_ids) :, None])[:, 0]
                assert (ours[i, : len(chosen)] - chosen).abs().max() <= 1e-5

    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
    learner = make_learner(config, load_models(config, folder, alone()), feed, tmp_path / "run")
    resume.resume(learner, feed.attach())
    digests = [weights_digest(learner.models.actor.module)]
    for _ in range(2):
        learner.step()
        digests.append(weights_digest(learner.models.actor.module))
    assert len(set(digests)) == 3
    assert all(np.isfinite(v) for v in learner.writer.lines[2].values())
    again = load_models(config, folder, alone())
    learner.checkpoints.load(learner.checkpoints.latest(), again)
    assert weights_digest(again.actor.module) == digests[-1]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {"num_local_experts": 2}),
        ("mamba", {}),
        ("jamba", {"num_experts": 1, "use_mamba_kernels": False, "attn_layer_offset": 1, "attn_layer_period": 2}),
    ],
    ids=["experts", "state space", "hybrid"],
)
def test_experts_and_state_space_models_are_refused_by_name(kind: str, changes: dict, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"models of type '{kind}'"):
        load_actor(tmp_path)


@pytest.mark.parametrize(("tokens", "refused"), [(64, False), (65, True)])
def test_positions_that_stretch_with_the_batch_are_refused_where_they_would(
    tokens: int, refused: bool, tmp_path: Path
) -> None:
    changes = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    config = AutoConfig.for_model("llama", **{**SMALL, **changes})
    if not refused:
        refuse_moving_positions(config, tokens)
        return
    with pytest.raises(ConfigError, match=r"'dynamic' stretch beyond 64 tokens .* \(now 65\)"):
        refuse_moving_positions(config, tokens)
    write_family(tmp_path / "llama", "llama", **changes)
    with pytest.raises(ConfigError, match=r"model\.path: its positions"):
        load_models(make_config("data.max_response_length=200"), tmp_path / "llama", alone())
