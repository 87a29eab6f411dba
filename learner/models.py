"""What a learner trains, as one: actor, critic, reference, their optimizers, the KL controller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.config import Config
from learner.estimates import KLController, make_kl_controller
from learner.initial import model_folder
from learner.lora import WithoutAdapters, add_adapters
from learner.model import (
    DTYPES,
    Actor,
    checkpoint_activations,
    freeze,
    load_actor,
    load_critic,
    shard,
    weights_digest,
)
from learner.optim import make_optimizer
from learner.ranks import Ranks
from learner.updates import Trainee


@dataclass
class Models:
    actor: Trainee
    critic: Trainee | None
    reference: Actor | WithoutAdapters | None
    kl_controller: KLController
    lora: Any = None  # peft's LoraConfig, if only adapters are trained
    base_digest: str = ""  # of the weights they belong to

    def trainees(self) -> list[Trainee]:
        return [t for t in (self.actor, self.critic) if t is not None]


def load_models(config: Config, folder: Path, ranks: Ranks) -> Models:
    """All models from the initial weights in `folder`, sharded, with fresh optimizers.

    Raises:
        ConfigError: a folder whose model cannot be loaded or is of a kind that is not known.
    """
    remote = config.model.trust_remote_code
    torch.manual_seed(config.run.seed)
    actor = load_actor(folder, trust_remote_code=remote)
    lora, base_digest = None, ""
    if config.model.lora_rank:
        base_digest = weights_digest(actor)
        lora = add_adapters(actor.lm, config.model, dtype=DTYPES[config.model.dtype])
    actor = _placed(_trained(actor, config), config, ranks)
    critic = reference = None
    if config.needs_critic:
        own = config.critic.model_path
        backbone = model_folder("critic.model_path", own) if own else folder
        module = _placed(_trained(load_critic(backbone, trust_remote_code=remote), config), config, ranks)
        critic = Trainee("critic", module, make_optimizer(module, config.critic.optim), config.critic)
    if config.needs_reference and lora is not None:
        reference = WithoutAdapters(actor)
    elif config.needs_reference:
        reference = _placed(freeze(load_actor(folder, trust_remote_code=remote)), config, ranks)
    trainee = Trainee("actor", actor, make_optimizer(actor, config.actor.optim), config.actor)
    return Models(trainee, critic, reference, make_kl_controller(config), lora, base_digest)


def _trained(module: nn.Module, config: Config) -> nn.Module:
    return checkpoint_activations(module) if config.model.enable_gradient_checkpointing else module


def _placed(module: nn.Module, config: Config, ranks: Ranks) -> nn.Module:
    return shard(module.to(ranks.device), ranks.mesh, dtype=config.model.dtype)
