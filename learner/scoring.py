"""Forward passes without gradient: what the models say of the sampled tokens before the first update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from common.config import Config
from learner.batch import Batch
from learner.estimates import StartOfStep
from learner.models import Models
from learner.offload import at_work
from learner.packing import MicroBatch, micro_batches
from learner.ranks import Ranks
from learner.report import Clock
from learner.updates import packing_of


def pack_all(batch: Batch, models: Models, config: Config, ranks: Ranks) -> list[MicroBatch]:
    """This rank's share of the whole batch, packed for forward passes of every model."""
    options = config.actor
    packing = packing_of(models.actor.module, options, config)
    share = all(m.shares_prompts for m in (models.reference, models.critic and models.critic.module) if m is not None)
    longest = options.log_prob_max_token_len_per_gpu or options.ppo_max_token_len_per_gpu
    packing = replace(
        packing,
        token_budget=packing.token_budget and longest * packing.split,
        share_prompts=packing.share_prompts and share,
    )
    return micro_batches(batch, np.arange(len(batch)), packing, rank=ranks.data_rank, world_size=ranks.data_size)


@torch.no_grad()
def start_of_step(
    models: Models, batch: Batch, micros: list[MicroBatch], *, config: Config, ranks: Ranks, clock: Clock
) -> StartOfStep:
    """Proximal log-probs and entropy, reference log-probs, values: as far as the config needs them."""
    proximal = entropy = ref = values = None
    if config.algorithm.proximal == "recompute":
        with clock("old_log_prob"):
            proximal, entropy = answers(models.actor.module, batch, micros, ranks, with_entropy=True)
    if models.reference is not None and config.needs_ref_logprobs:
        with clock("ref"):
            ref, _ = answers(models.reference, batch, micros, ranks, with_entropy=False)
    if models.critic is not None:
        with clock("values"):
            (values,) = answers(models.critic.module, batch, micros, ranks)
    return StartOfStep(proximal, entropy, ref, values)


def answers(
    model: nn.Module, batch: Batch, micros: list[MicroBatch], ranks: Ranks, **options: bool
) -> tuple[Tensor | None, ...]:
    """The model's outputs on all micro-batches, scattered back to [batch, response]; the same on every rank.

    A rank leaves 0 where the rows are another's, so the sum over ranks is the whole.
    """
    whole: dict[int, Tensor] = {}
    with at_work(model):
        for micro in micros:
            outputs = model(micro, **options)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            for i, output in enumerate(outputs):
                if output is not None:
                    into = whole.setdefault(i, torch.zeros_like(batch.behavior_logprobs, dtype=output.dtype))
                    into[micro.rows] = micro.scatter(output)
    return tuple(ranks.sum(whole[i]) if i in whole else None for i in range(len(outputs)))
