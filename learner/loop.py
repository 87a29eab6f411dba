"""The learner's step.

    claim batch → proximal, reference log-probs, values → correction (weights, rejection) → advantages
    → for each mini-batch: loss, backward, clip, step → acknowledge → publish → checkpoint

Consumes claims (batches of B groups) from the broker. Produces versions of the weights. Waits for
the broker alone, with a reason that is logged. Unblocked by ready groups, the end of the data, stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.config import Config
from common.failpoints import failpoint
from learner.batch import Batch, micro_batches
from learner.estimates import StartOfStep, make_targets
from learner.models import Models
from learner.ranks import Ranks
from learner.report import Clock, Metrics, drift_metrics, mean_of_updates, target_metrics
from learner.updates import NotFinite, actor_loss, critic_loss, rate_of, train_on_batch


@dataclass(frozen=True)
class Outcome:
    """What became of a batch."""

    applied: bool
    reason: str = ""  # why not
    partly: bool = False  # not applied, but the weights are no longer those of the version
    metrics: Metrics | None = None


def train_step(
    models: Models, batch: Batch, *, config: Config, settings: dict[str, float], step: int, version: int, ranks: Ranks,
    clock: Clock,
) -> Outcome:  # fmt: skip
    """One batch, from its log-probs to new weights. The same for a step and for its redoing.

    step: number of the row this step becomes; version: of the weights as they are now.
    """
    start = start_of_step(models, batch, config=config, ranks=ranks, clock=clock)
    with clock("adv"):
        targets, metrics = make_targets(config, batch, start, kl_controller=models.kl_controller, step=step)
        metrics |= target_metrics(targets, batch.mask) | drift_metrics(batch, start, targets, version=version)
    failpoint("learner.before_update")
    try:
        critic, actor = models.critic, models.actor
        of_critic, of_actor = [], []
        if critic is not None:
            with clock("update_critic"):
                loss = critic_loss(config, critic.module, targets)
                lr = rate_of(config, "critic", settings, step)
                of_critic = train_on_batch(critic, batch, targets.live, loss, config=config, lr=lr, ranks=ranks)
        if step > config.critic.warmup_steps or critic is None:
            with clock("update_actor"):
                loss = actor_loss(config, actor.module, batch, targets, settings, step=step, version=version)
                lr = rate_of(config, "actor", settings, step)
                of_actor = train_on_batch(actor, batch, targets.live, loss, config=config, lr=lr, ranks=ranks)
    except NotFinite as e:
        return Outcome(False, "nonfinite", partly=e.partly or bool(of_critic), metrics=metrics)
    return Outcome(True, metrics=metrics | mean_of_updates(of_critic) | mean_of_updates(of_actor))


@torch.no_grad()
def start_of_step(models: Models, batch: Batch, *, config: Config, ranks: Ranks, clock: Clock) -> StartOfStep:
    """What the models say of the sampled tokens before the first update."""
    options = config.actor
    micros = micro_batches(
        batch,
        np.arange(len(batch)),
        token_budget=(options.log_prob_max_token_len_per_gpu or options.ppo_max_token_len_per_gpu)
        if options.use_dynamic_bsz
        else None,
        rows_per_batch=options.ppo_micro_batch_size_per_gpu,
    )

    def ask(model, **options):  # -> list of [batch, response]
        """The model's answers on all micro-batches, each scattered back."""
        whole = None
        for micro in micros:
            answers = model(micro, **options)
            answers = answers if isinstance(answers, tuple) else (answers,)
            if whole is None:
                whole = [torch.zeros_like(batch.behavior_logprobs) for _ in answers]
            for into, answer in zip(whole, answers, strict=True):
                if answer is not None:
                    into[micro.rows] = micro.scatter(answer)
        return [ranks.sum(into) for into in whole]

    proximal = entropy = ref = values = None
    if config.algorithm.proximal == "recompute":
        with clock("old_log_prob"):
            proximal, entropy = ask(models.actor.module, with_entropy=True)
    if models.reference is not None:
        with clock("ref"):
            ref, _ = ask(models.reference)
    if models.critic is not None:
        with clock("values"):
            (values,) = ask(models.critic.module)
    return StartOfStep(proximal, entropy, ref, values)
