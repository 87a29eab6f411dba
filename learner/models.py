"""What a learner trains, as one: actor, critic, reference, their optimizers, the KL controller."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.adapters import Adapters
from common.config import Config, Trained
from common.errors import ConfigError
from common.logs import LOGGER
from learner.estimates import KLController, make_kl_controller
from learner.families import refuse_moving_positions
from learner.initial import model_folder
from learner.lora import WithoutAdapters, add_adapters
from learner.model import DTYPES, Actor, build_actor, build_critic, freeze, load_actor, load_critic
from learner.offload import Offload, put_away
from learner.optim import make_optimizer
from learner.ranks import Ranks
from learner.served import digest_of
from learner.sharding import checkpoint_activations, compile_layers, place
from learner.updates import Trainee

_log = logging.getLogger(LOGGER)


@dataclass
class Models:
    actor: Trainee
    critic: Trainee | None
    reference: Actor | WithoutAdapters | None
    kl_controller: KLController
    base_digests: dict[str, str] = field(default_factory=dict)  # by trainee: of the weights that its adapters belong to

    def trainees(self) -> list[Trainee]:
        return [t for t in (self.actor, self.critic) if t is not None]


def load_models(config: Config, folder: Path, ranks: Ranks) -> Models:
    """All models from the initial weights in `folder`, sharded, with fresh optimizers.

    Raises:
        ConfigError: a folder whose model cannot be loaded or is of a kind that is not known.
    """
    if config.rounds_adapters_away and ranks.first:
        _log.warning(
            "model.lora_rank=%d, model.dtype=bfloat16: engines get adapters merged into bfloat16 weights, which rounds "
            "most of a small update away, so they sample from nearly the base; set weights.adapters_only=true, or "
            "model.dtype=float32", config.model.lora_rank,
        )  # fmt: skip
    torch.manual_seed(config.run.seed)
    actor = _trainee("actor", build_actor, load_actor, folder, config, ranks)
    critic = reference = None
    if config.needs_critic:
        own = config.critic.model_path
        backbone = model_folder("critic.model_path", own) if own else folder
        critic = _trainee("critic", build_critic, load_critic, backbone, config, ranks)
    if config.needs_reference and config.model.lora_rank:
        reference = WithoutAdapters(actor.module)
    elif config.needs_reference:
        frozen = freeze(build_actor(folder, **_built(config, ranks)))
        reference = _placed(frozen, load_actor, folder, config, ranks, offload=config.ref.fsdp_config.offload_policy)
        reference.offload = Offload(config.ref.fsdp_config.param_offload, False, ranks.device)
        put_away(reference)
    models = Models(actor, critic, reference, make_kl_controller(config))
    models.base_digests = {t.name: _base_digest(t) for t in models.trainees() if t.module.lora is not None}
    return models


def _trainee(name: str, build: Any, load: Any, folder: Path, config: Config, ranks: Ranks) -> Trainee:
    options: Trained = getattr(config, name)
    places = options.fsdp_config
    module = build(folder, **_built(config, ranks))
    refuse_moving_positions(
        getattr(module, module.holder.removesuffix(".")).config, config.max_sequence_tokens,
        key="model.path" if name == "actor" else "critic.model_path",
    )  # fmt: skip
    if (adapters := adapters_of(config, name)) is not None:
        holder = module.get_submodule(module.holder.removesuffix("."))
        module.lora = add_adapters(holder, adapters, dtype=DTYPES[config.model.dtype])
    if options.use_torch_compile:
        compile_layers(module, ranks.device, key=f"{name}.use_torch_compile")
    if config.model.enable_gradient_checkpointing:
        checkpoint_activations(module)
    _placed(module, load, folder, config, ranks, offload=places.offload_policy)
    optimizer = make_optimizer(module, options.optim)
    module.offload = Offload(places.param_offload, places.optimizer_offload, ranks.device)
    put_away(module, optimizer)
    return Trainee(name, module, optimizer, options)


def adapters_of(config: Config, name: str) -> Adapters | None:
    """Those that the config gives "actor" or "critic"; None: all of its weights are trained."""
    part = config.model if name == "actor" else config.critic
    if part.lora_rank == 0:
        return None
    return Adapters.of(part, "model" if name == "actor" else "critic")


def _base_digest(trainee: Trainee) -> str:
    """Of the weights that its adapters belong to."""
    return digest_of([p for p in trainee.module.parameters() if not p.requires_grad])


def _built(config: Config, ranks: Ranks) -> dict[str, Any]:
    varlen = config.model.attn_implementation == "varlen"
    if varlen and ranks.device.type != "cuda":
        raise ConfigError("model.attn_implementation=varlen: flash attention needs a GPU; take sdpa")
    return {"split": ranks.split_group, "varlen": varlen, "trust_remote_code": config.model.trust_remote_code}


def _placed(module: nn.Module, load: Any, folder: Path, config: Config, ranks: Ranks, *, offload: bool) -> nn.Module:
    whole = functools.partial(load, folder, trust_remote_code=config.model.trust_remote_code)
    return place(module, folder, whole, ranks, dtype=config.model.dtype, offload=offload)
