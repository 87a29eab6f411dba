"""LoRA: only adapters are trained, checkpointed; engines, the reference and the files left behind need no adapters."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from common.adapters import Adapters
from common.errors import CheckpointError, ConfigError, LeewayError
from common.logs import LOGGER
from learner import ending, resume
from learner.batch import make_batch
from learner.correction import offpolicy_metrics
from learner.export import save_hf
from learner.initial import load_tokenizer
from learner.loop import Learner
from learner.lora import adapters_off, add_adapters, merged_parameters, save_adapter
from learner.model import Actor, load_actor
from learner.models import load_models
from learner.packing import Packing, micro_batches
from learner.scoring import answers
from learner.served import PublishedWeights, weights_digest
from tests.families import FAMILIES, SMALL
from tests.learner_parts import SimulatedFeed, alone, make_config, make_groups, make_learner

LORA = ("model.lora_rank=4", "model.lora_alpha=8", "actor.optim.lr=1e-2")


@pytest.fixture
def learner_of(weights: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(*options: str, folder: str = "run", feed: SimulatedFeed | None = None) -> Learner:
        config = make_config(*LORA, *options)
        feed = feed or SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
        learner = make_learner(config, load_models(config, weights, alone()), feed, tmp_path / folder)
        resume.resume(learner, feed.attach())
        return learner

    return make


def _parameters(learner: Learner) -> dict[str, torch.Tensor]:
    lm = learner.models.actor.module.lm
    return {n: p.detach().full_tensor().clone() for n, p in lm.named_parameters()}


def _published(learner: Learner, dtype: str = "float32") -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in PublishedWeights(learner.models.actor.module, dtype=dtype)}


@torch.no_grad()
def _logprobs(model: Any) -> torch.Tensor:
    """Of random responses, by an actor or a Hugging Face model."""
    batch = make_batch(make_groups(make_config(), 7))
    actor = model if isinstance(model, Actor) else Actor(model.float().eval())
    micros = micro_batches(batch, np.arange(len(batch)), Packing(4096, share_prompts=actor.shares_prompts))
    return answers(actor, batch, micros, alone(), with_entropy=False)[0]


def test_only_adapters_are_trained_and_engines_get_the_merged_weights(
    learner_of: Callable[..., Learner], weights: Path
) -> None:
    learner = learner_of()
    plain = AutoModelForCausalLM.from_pretrained(weights).float().eval()
    before, first = _parameters(learner), _published(learner)
    assert list(first) == [n for n, _ in plain.named_parameters()]
    assert all(torch.equal(first[n], p) for n, p in plain.named_parameters())
    for _ in range(3):
        learner.step()
    after = _parameters(learner)
    changed = {n for n in after if not torch.equal(before[n], after[n])}
    assert changed == {n for n in after if ".lora_" in n}

    digest = weights_digest(learner.models.actor.module)
    merged = _published(learner)
    assert weights_digest(learner.models.actor.module) == digest
    assert all(torch.equal(t, after[n]) for n, t in _parameters(learner).items()), "nothing was merged in place"
    plain.load_state_dict(merged, strict=False)
    assert (_logprobs(plain) - _logprobs(AutoModelForCausalLM.from_pretrained(weights))).abs().max() > 1e-2
    assert (_logprobs(plain) - _logprobs(learner.models.actor.module)).abs().max() < 1e-5


def test_the_reference_is_the_base_and_takes_no_memory(learner_of: Callable[..., Learner], weights: Path) -> None:
    learner = learner_of("actor.ppo_mini_batch_size=4")
    actor = learner.models.actor.module
    assert {id(p) for p in learner.models.reference.parameters()} == {id(p) for p in actor.parameters()}
    learner.step()
    assert learner.writer.lines[1]["actor/kl_loss"] < 1e-5, "the first updates begin at the reference"
    learner.step()
    assert learner.writer.lines[2]["actor/kl_loss"] > 1e-4
    with adapters_off(actor):
        off = _logprobs(actor)
    assert torch.equal(off, _logprobs(AutoModelForCausalLM.from_pretrained(weights)))
    assert not torch.equal(off, _logprobs(actor)), "they are on again"


def test_a_checkpoint_holds_the_adapters_alone_and_resumes(learner_of: Callable[..., Learner]) -> None:
    feed = SimulatedFeed(lambda step, version: make_groups(make_config(), step, version=version))
    learner = learner_of("trainer.save_freq=2", feed=feed)
    for _ in range(3):
        learner.step()
    saved = FileSystemReader(learner.checkpoints.latest()).read_metadata().state_dict_metadata
    assert {n for n in saved if n.startswith("actor.model.") and ".lora_" not in n} == set()
    assert sum(n.startswith("actor.model.") for n in saved) == 2 * 14  # two layers of seven linear ones, A and B

    second = learner_of("trainer.save_freq=2", feed=feed)
    assert (second.progress.step, sorted(second.writer.lines)) == (3, [3])
    assert all(torch.equal(t, _parameters(learner)[n]) for n, t in _parameters(second).items())
    with pytest.raises(CheckpointError, match=r"'alpha': 8.*this run has .*'alpha': 32"):
        learner_of("model.lora_alpha=32", feed=feed)
    with pytest.raises(CheckpointError, match="this run has none"):
        learner_of("model.lora_rank=0", feed=feed)


def test_what_a_run_leaves_behind_loads_with_and_without_peft(
    learner_of: Callable[..., Learner], weights: Path
) -> None:
    learner = learner_of("run.max_steps=2")
    learner.publish(always=True)
    ending.finish(learner, learner.run(), tokenizer=load_tokenizer(weights, learner.config))
    trained = _logprobs(learner.models.actor.module)
    merged = AutoModelForCausalLM.from_pretrained(learner.run_dir / "hf")
    assert (_logprobs(merged) - trained).abs().max() < 1e-5
    base = AutoModelForCausalLM.from_pretrained(weights)
    with_adapter = PeftModel.from_pretrained(base, learner.run_dir / "adapter").eval()
    assert (_logprobs(with_adapter.get_base_model()) - trained).abs().max() < 1e-5


def test_a_disk_that_is_full_at_the_end_is_named_and_what_is_saved_already(
    learner_of: Callable[..., Learner], weights: Path, tmp_path: Path
) -> None:
    learner = learner_of()
    actor, tokenizer = learner.models.actor.module, load_tokenizer(weights, learner.config)
    says = r"cannot be written \(.*File too large.*\); the last step is in a checkpoint, so mend that and run the same"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))  # config and the like fit
    try:
        with pytest.raises(LeewayError, match=rf"{tmp_path}/adapter: {says}"):
            save_adapter(tmp_path / "adapter", actor.lm, actor.lora, base=str(weights), first=True)
        with pytest.raises(LeewayError, match=rf"{tmp_path}/hf: {says}"):
            save_hf(tmp_path / "hf", actor, tokenizer, dtype="float32", ranks=alone())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (tmp_path / "adapter").write_text("")
    with pytest.raises(LeewayError, match=r"deeper: cannot be written \((Not a directory|File exists)\)"):
        save_adapter(tmp_path / "adapter" / "deeper", actor.lm, actor.lora, base=str(weights), first=True)


def test_the_frozen_part_is_kept_in_the_dtype_that_is_served(weights: Path) -> None:
    models = load_models(make_config(*LORA, "model.dtype=bfloat16"), weights, alone())
    kinds = {(".lora_" in n, p.dtype) for n, p in models.actor.module.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    for only in (False, True):
        weights = PublishedWeights(models.actor.module, dtype="bfloat16", adapters_only=only)
        assert list(weights.kinds()) == [(n, "bfloat16", tuple(t.shape)) for n, t in weights]
        assert {t.dtype for _, t in weights} == {torch.bfloat16}
        assert all((".lora_" in n) is only for n, _, _ in weights.kinds())


def _merged(learner: Learner) -> dict[str, torch.Tensor]:
    """W + (alpha / rank) · B A as the learner computes: float32."""
    return {name: rows.float() for name, rows, _ in merged_parameters(learner.models.actor.module.lm)}


def test_merged_in_bfloat16_engines_get_a_part_of_the_update_and_adapters_alone_all_of_it(
    learner_of: Callable[..., Learner], weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bfloat16 = ("model.dtype=bfloat16", "actor.optim.lr=1e-5", "actor.use_kl_loss=false")
    with caplog.at_level("WARNING", LOGGER):
        learner_of("weights.adapters_only=true", *bfloat16)
        assert "adapters" not in caplog.text
        learner = learner_of(*bfloat16)
        assert "rounds most of a small update away" in caplog.text and "weights.adapters_only=true" in caplog.text
    base = _merged(learner)
    for _ in range(8):
        learner.step()
    trained, merged = _merged(learner), _published(learner, "bfloat16")
    sent = PublishedWeights(learner.models.actor.module, dtype="bfloat16", adapters_only=True)
    adapters = {name: t.float() for name, t in sent}
    alone = dict(base)
    for name in {n.partition(".lora_")[0] for n in adapters}:
        alone[f"{name}.weight"] = base[f"{name}.weight"] + 2 * adapters[f"{name}.lora_B.weight"] @ (
            adapters[f"{name}.lora_A.weight"]
        )
    update = torch.cat([(trained[n] - base[n]).flatten() for n in base])

    def seen(served: dict[str, torch.Tensor]) -> tuple[float, float]:
        """(share of the update that engines have, their KL to the learner as `rollout_corr` sees it)"""
        theirs = torch.cat([(served[n].float() - base[n]).flatten() for n in base])
        batch = make_batch(make_groups(make_config(), 7))
        logprobs = []
        for given in (trained, served):
            plain = load_actor(weights)
            plain.lm.load_state_dict({n: t.float() for n, t in given.items()}, strict=False)
            logprobs.append(_logprobs(plain))
        drift = offpolicy_metrics(*logprobs, batch.mask)["k3_kl"]
        return float(theirs @ update / (update @ update)), float(drift)

    (share, drift), (share_alone, drift_alone) = seen(merged), seen(alone)
    assert share < 0.6 and share_alone == pytest.approx(1, abs=0.01)
    assert drift > 100 * drift_alone


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})).float()
    lm.save_pretrained(tmp_path / "model")
    config = make_config(*LORA, "model.target_modules=[q_proj, v_proj]")
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
    learner = make_learner(config, load_models(config, tmp_path / "model", alone()), feed, tmp_path / "run")
    resume.resume(learner, feed.attach())
    learner.step()
    learner.step()
    assert sum(".lora_" in n for n in _parameters(learner)) == 2 * 2 * 2
    plain = load_actor(tmp_path / "model")
    missing = plain.lm.load_state_dict(_published(learner), strict=False)
    assert missing.unexpected_keys == [] and set(missing.missing_keys) <= {"lm_head.weight"}  # tied
    assert (_logprobs(plain) - _logprobs(learner.models.actor.module)).abs().max() < 1e-5


CRITIC = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-2", "critic.lora_rank=4", "critic.lora_alpha=8")


def _critic(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor().clone() for n, p in learner.models.critic.module.named_parameters()}


@pytest.mark.parametrize("actor", [(), ("model.lora_rank=0",)], ids=["both", "the critic alone"])
def test_a_critic_with_adapters_trains_them_and_its_whole_head(
    learner_of: Callable[..., Learner], actor: tuple[str, ...]
) -> None:
    """They may be resumed, beside the same adapters only."""
    feed = SimulatedFeed(lambda step, version: make_groups(make_config(), step, version=version))
    options = (*CRITIC, *actor, "trainer.save_freq=2")
    learner = learner_of(*options, feed=feed)
    before = _critic(learner)
    assert sum(".lora_" in n for n in before) == 2 * 14
    for _ in range(3):
        learner.step()
    after = _critic(learner)
    changed = {n for n in after if not torch.equal(before[n], after[n])}
    assert changed == {n for n in after if ".lora_" in n or n.startswith("value_head.")}

    saved = FileSystemReader(learner.checkpoints.latest()).read_metadata().state_dict_metadata
    assert sum(n.startswith("critic.model.") for n in saved) == 2 * 14 + 2
    second = learner_of(*options, feed=feed)
    assert (second.progress.step, sorted(second.writer.lines)) == (3, [3])
    assert all(torch.equal(t, after[n]) for n, t in _critic(second).items())
    with pytest.raises(CheckpointError, match=r"'critic': .*'alpha': 8.*this run has .*'critic': .*'alpha': 32"):
        learner_of(*options, "critic.lora_alpha=32", feed=feed)


def test_a_critics_adapters_begin_as_the_critic_without_them(weights: Path) -> None:
    batch = make_batch(make_groups(make_config(), 7))
    values = []
    for options in ((), CRITIC):
        models = load_models(make_config("algorithm.adv_estimator=gae", *options), weights, alone())
        critic = models.critic.module
        torch.nn.init.ones_(critic.value_head.weight)
        micros = micro_batches(batch, np.arange(len(batch)), Packing(4096, share_prompts=critic.shares_prompts))
        with torch.no_grad():
            values.append(answers(critic, batch, micros, alone())[0])
    assert values[0].abs().max() > 0.1
    assert (values[0] - values[1]).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("targets", "fault"),
    [
        (["q_proj", "lm_head"], "lm_head is a Linear at the model's end"),
        (["embed_tokens"], "embed_tokens is a Embedding"),
        (["attention"], r"model\.target_modules=\['attention'\]: Target modules .* not found"),
    ],
)
def test_layers_that_cannot_be_merged_are_refused_by_name(targets: list[str], fault: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **{**SMALL, **FAMILIES["llama"]})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    adapters = Adapters(4, 8, targets)  # the config knows some of these names
    with pytest.raises(ConfigError, match=fault):
        add_adapters(load_actor(tmp_path).lm, adapters)


def test_a_missing_peft_is_named(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora_rank: needs peft"):
        add_adapters(load_actor(weights).lm, Adapters.of(make_config(*LORA).model))
