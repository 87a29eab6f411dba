"""Models read from a folder by slices, kept on the host, compiled. (Several ranks: `test_ranks.py`.)"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.logs import LOGGER
from learner import offload, sharding
from learner.attention import KEY, attend_by_rows
from learner.batch import make_batch
from learner.loop import train_step
from learner.model import build_actor, build_critic, load_actor, load_critic
from learner.models import Models, load_models
from learner.offload import Offload, at_work, put_away
from learner.optim import make_optimizer
from learner.ranks import arrange
from learner.report import Clock
from learner.served import weights_digest
from learner.settings import live_settings
from learner.sharding import place
from tests.families import write_family
from tests.learner_parts import SimulatedControl, alone, initial_weights, make_config, make_groups


def _placed(build: Callable[..., nn.Module], load: Callable[..., nn.Module], folder: Path) -> nn.Module:
    return place(build(folder), folder, functools.partial(load, folder), alone(), dtype="float32")


def _never(*_: Any) -> nn.Module:
    raise AssertionError("the whole model was loaded")


def test_weights_in_several_files_are_read_by_slices(tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(write_family(tmp_path / "one", "llama"))
    lm.save_pretrained(tmp_path / "several", max_shard_size="100KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    actor = _placed(build_actor, _never, tmp_path / "several")
    assert weights_digest(actor) == weights_digest(load_actor(tmp_path / "one"))


def test_a_critic_takes_the_backbone_out_of_a_causal_lm_and_starts_at_0(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    critic = _placed(build_critic, _never, folder)
    assert weights_digest(critic) == weights_digest(load_critic(folder))
    load_critic(folder).backbone.save_pretrained(tmp_path / "backbone")
    assert weights_digest(_placed(build_critic, _never, tmp_path / "backbone")) == weights_digest(critic)


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_weight_that_has_two_values_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama tied")
    _change(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert weights_digest(_placed(build_actor, _never, folder)) == weights_digest(load_actor(folder))
    _change(folder, lambda w: w["lm_head.weight"][3].add_(1))
    with pytest.raises(ConfigError, match=r"ties lm_head.weight to model.embed_tokens.weight, but their values differ"):
        _placed(build_actor, _never, folder)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama")
    _change(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"no weights for model.layers.1.mlp.up_proj.weight; they would be random"):
        _placed(build_actor, load_actor, folder)


# ---------------------------------------------------------------- rows divided among ranks
class SimulatedGroup:
    def __init__(self, size: int) -> None:
        self.size = lambda: size


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "match"),
    [
        ("qwen2", {}, 3, rf"{KEY}=3: this model of type 'qwen2' has 4 attention heads"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2, r"positions of type 'dynamic' depend"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict, ranks: int, match: str
) -> None:
    actor = build_actor(write_family(tmp_path, family, **changes))
    with pytest.raises(ConfigError, match=match):
        attend_by_rows(actor.lm, group=SimulatedGroup(ranks))


def test_a_family_that_is_not_known_to_attend_by_rows_is_refused(tmp_path: Path) -> None:
    actor = build_actor(write_family(tmp_path, "qwen2"))
    actor.lm.config.model_type = "novel"
    with pytest.raises(ConfigError, match=rf"{KEY}=2: models of type 'novel' are not known to attend by rows"):
        attend_by_rows(actor.lm, group=SimulatedGroup(2))


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=2: does not divide the learner's 1 ranks"):
        arrange(alone(), split=2, shard_size=-1)
    with pytest.raises(ConfigError, match="fsdp_size=4: does not divide the learner's 1 ranks"):
        arrange(alone(), split=1, shard_size=4)


# ---------------------------------------------------------------- host memory
def _step(models: Models, config: Any, step: int = 1) -> None:
    settings = live_settings(config, SimulatedControl())
    outcome = train_step(
        models, make_batch(make_groups(config, step)), config=config, settings=settings, step=step, version=0, limit=2,
        ranks=alone(), clock=Clock(),
    )  # fmt: skip
    assert outcome.applied


def test_weights_and_moments_go_to_the_host_and_the_count_stays(tmp_path: Path) -> None:
    """The meta device stands in for a host apart from the device; what goes there does not come back."""
    config = make_config()
    actor = _placed(build_actor, _never, initial_weights(tmp_path, config))
    optimizer = make_optimizer(actor, config.actor.optim)
    actor.offload = Offload(False, True, torch.device("cpu"), host=torch.device("meta"))
    put_away(actor, optimizer)
    assert {p.device.type for p in actor.parameters()} == {"cpu"}
    for state in optimizer.state.values():
        assert [state[k].device.type for k in ("step", "exp_avg", "exp_avg_sq")] == ["cpu", "meta", "meta"]
    actor.offload = Offload(True, False, torch.device("cpu"), host=torch.device("meta"))
    before = list(actor.parameters())
    put_away(actor, optimizer)
    assert {p.device.type for p in actor.parameters()} == {"meta"}
    assert all(p is q for p, q in zip(before, optimizer.param_groups[0]["params"], strict=True))


def test_each_model_is_on_the_device_only_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("algorithm.adv_estimator=gae", "actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4")
    models = load_models(config, initial_weights(tmp_path, config), alone())
    host, device = torch.device("meta"), torch.device("cpu")
    names = {models.actor.module: "actor", models.critic.module: "critic", models.reference: "reference"}
    moves: list[tuple[str, bool, str]] = []

    def simulated_move(module: nn.Module, optimizer: Any, offload: Offload, to: torch.device) -> None:
        moves.append((names[module], optimizer is not None, "host" if to == host else "device"))

    monkeypatch.setattr(offload, "_move", simulated_move)
    for module in names:
        module.offload = Offload(True, True, device, host=host)
    _step(models, config)
    expected = [("actor", False), ("reference", False), ("critic", False), ("critic", True), ("actor", True)]
    assert moves == [(*work, to) for work in expected for to in ("device", "host")]


def test_an_error_puts_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[torch.device] = []
    monkeypatch.setattr(offload, "_move", lambda module, optimizer, offload, to: moves.append(to))
    module = nn.Linear(1, 1)
    module.offload = Offload(True, False, torch.device("cpu"), host=torch.device("meta"))
    with pytest.raises(ValueError, match="x"), at_work(module):
        raise ValueError("x")
    assert [d.type for d in moves] == ["cpu", "meta"]


def test_where_all_memory_is_the_hosts_nothing_moves_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("actor.fsdp_config.param_offload=true", "actor.fsdp_config.optimizer_offload=true")
    folder = initial_weights(tmp_path, config)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        models = load_models(config, folder, alone())
    assert caplog.text.count("offloading moves nothing") == 1
    plain = load_models(make_config(), folder, alone())
    for m, c in ((models, config), (plain, make_config())):
        _step(m, c)
    assert weights_digest(models.actor.module) == weights_digest(plain.actor.module)


# ---------------------------------------------------------------- compiled layers
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_layers_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """aot_eager: the same graphs, which PyTorch's own kernels run."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # engines in this process have turned it off
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    folder = initial_weights(tmp_path, make_config())
    results = []
    for options in (("actor.use_torch_compile=true", "model.enable_gradient_checkpointing=true"), ()):
        config = make_config(*options, "actor.ppo_mini_batch_size=4", "actor.use_kl_loss=false", "actor.optim.eps=1e-3")
        models = load_models(config, folder, alone())
        for step in (1, 2):
            _step(models, config, step)
        results.append([p.full_tensor().detach() for p in models.actor.module.parameters()])
    assert all((a - b).abs().max() <= 1e-5 for a, b in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_without_a_compiler_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"actor.use_torch_compile=true: a C\+\+ compiler is not there; install it"):
        sharding.compile_layers(nn.Linear(1, 1), torch.device("cpu"), key="actor.use_torch_compile")
