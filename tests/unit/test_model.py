"""Models: the toy, what is published, digests, the critic, sharding, the Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError
from common.tasks import TASKS
from learner.batch import make_batch
from learner.export import save_hf
from learner.initial import initial_folder, load_tokenizer, served_folder
from learner.model import Actor, load_actor, load_critic
from learner.models import load_models
from learner.packing import Packing, micro_batches
from learner.served import PublishedWeights, weights_digest
from learner.sharding import shard
from learner.toy import ALPHABET, EOS_ID, VOCABULARY, write_toy_folder
from tests.learner_parts import alone, initial_weights, make_config, make_groups
from tests.models import tiny_config, tiny_model


def test_the_toy_tokenizer_has_a_token_for_each_character_of_every_task(tmp_path: Path) -> None:
    write_toy_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for task in TASKS.values():
        assert set(task.alphabet) <= set(ALPHABET)
    text = "reverse 48213=\n(a*b)"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text
    assert (tokenizer.eos_token_id, len(tokenizer), tokenizer.chat_template) == (EOS_ID, len(VOCABULARY), None)


def test_the_toy_model_has_304256_parameters(tmp_path: Path) -> None:
    actor = load_actor(initial_weights(tmp_path, make_config()))
    assert sum(p.numel() for p in actor.parameters()) == 304_256


def test_the_folder_with_the_first_weights_is_made_once(tmp_path: Path) -> None:
    config = make_config("run.seed=3")
    served = served_folder(config, tmp_path)
    tokenizer = load_tokenizer(served, config)
    folder, _ = initial_folder(config, tmp_path, served, tokenizer, stop=None)
    first = weights_digest(load_actor(folder))
    again, _ = initial_folder(make_config("run.seed=4"), tmp_path, served, tokenizer, stop=None)
    assert (folder, again) == (served, served)
    assert weights_digest(load_actor(again)) == first


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path=.*: not a loadable causal LM"):
        load_actor(tmp_path)
    with pytest.raises(ConfigError, match=r"critic.model_path=.*: not a loadable model"):
        load_critic(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path, make_config())


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_are_the_models_without_a_tied_head(tied: bool) -> None:
    model = tiny_model(0, tie_word_embeddings=tied)
    weights = PublishedWeights(Actor(model), dtype="float32")
    published = dict(weights)
    assert list(weights.kinds()) == [(n, "float32", tuple(t.shape)) for n, t in published.items()]
    assert ("lm_head.weight" in published) is (not tied)
    fresh = AutoModelForCausalLM.from_config(tiny_config(tie_word_embeddings=tied))
    missing, unexpected = fresh.load_state_dict(published, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])


def test_sharding_changes_no_number_and_no_name(tmp_path: Path) -> None:
    folder = initial_weights(tmp_path, make_config())
    plain, sharded = load_actor(folder), shard(load_actor(folder), alone().mesh, dtype="float32")
    batch = make_batch(make_groups(make_config(), 0))
    (micro,) = micro_batches(batch, np.arange(16), Packing(4096))
    assert torch.equal(plain(micro)[0], sharded(micro)[0])
    assert [n for n, _ in PublishedWeights(sharded, dtype="float32")] == [n for n, _ in plain.lm.named_parameters()]
    assert weights_digest(plain) == weights_digest(sharded)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights_and_temperatures(tmp_path: Path) -> None:
    config = make_config("model.dtype=bfloat16")
    models = load_models(config, initial_weights(tmp_path, config), alone())
    actor = models.actor.module
    batch = make_batch(make_groups(config, 0))
    (micro,) = micro_batches(batch, np.arange(16), Packing(4096))
    logprobs, _ = actor(micro)
    exact, _ = load_actor(tmp_path)(micro)
    assert logprobs.dtype == torch.float32
    assert 0 < (logprobs - exact).abs().max() < 0.1
    assert {t.dtype for _, t in PublishedWeights(actor, dtype="bfloat16")} == {torch.bfloat16}
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    assert weights_digest(actor) == weights_digest(load_actor(tmp_path))


def test_a_critic_starts_at_0_and_answers_for_the_prefix(tmp_path: Path) -> None:
    critic = load_critic(initial_weights(tmp_path, make_config()))
    batch = make_batch(make_groups(make_config(), 0))
    (micro,) = micro_batches(batch, np.arange(16), Packing(4096))
    assert critic(micro).tolist() == [0.0] * len(micro.targets)
    torch.nn.init.ones_(critic.value_head.weight)
    assert critic(micro).abs().sum() > 0


def test_the_critics_own_folder_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config("algorithm.adv_estimator=gae", "critic.model_path=~/critic")
    folder = initial_weights(tmp_path / "critic", config)
    assert load_models(config, folder, alone()).critic is not None


def test_a_digest_changes_with_one_bit_and_with_a_swap_of_tensors() -> None:
    module = torch.nn.ParameterList([torch.zeros(3), torch.ones(3)])
    first = weights_digest(module)
    module[0].data[1] = 1e-45  # the smallest float32
    changed = weights_digest(module)
    swapped = weights_digest(torch.nn.ParameterList([torch.ones(3), torch.zeros(3)]))
    assert len({first, changed, swapped}) == 3


def test_the_hugging_face_folder_loads_and_is_replaced_whole(tmp_path: Path) -> None:
    config = make_config()
    folder = initial_weights(tmp_path / "model", config)
    actor = load_models(config, folder, alone()).actor.module
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = tmp_path / "hf"
    (target / "left over").mkdir(parents=True)
    save_hf(target, actor, tokenizer, dtype="float32", ranks=alone())
    assert not (target / "left over").exists()
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    for name, p in PublishedWeights(actor, dtype="float32"):
        assert torch.equal(p, loaded.get_parameter(name)), name
    assert AutoTokenizer.from_pretrained(target)("ab")["input_ids"] == tokenizer("ab")["input_ids"]
    assert loaded.generation_config.eos_token_id == EOS_ID
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.6, "top_p": 0.9}, {"early_stopping": True, "eos_token_id": EOS_ID},
     {"do_sample": True, "temperature": 0.0}],
)  # fmt: skip
def test_generation_settings_that_transformers_would_not_save_do_not_cost_the_folder(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = initial_weights(tmp_path / "model", make_config())
    (folder / "generation_config.json").write_text(json.dumps(settings))
    actor = load_models(make_config(), folder, alone()).actor.module
    save_hf(tmp_path / "hf", actor, AutoTokenizer.from_pretrained(folder), dtype="float32", ranks=alone())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    if "eos_token_id" in settings:
        assert loaded.generation_config.eos_token_id == EOS_ID
