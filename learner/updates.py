"""The updates of a step: for each mini-batch the losses of its micro-batches, backward, clip, step.

Denominators are those of the whole mini-batch over all ranks, counted after the masks and before
the first micro-batch; losses and metrics of micro-batches are parts that add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.config import Config, Trained
from common.failpoints import failpoint
from learner.batch import Batch, group_slices
from learner.correction import loglinear_proximal
from learner.estimates import Targets, kl_is_on, token_weights
from learner.exact_kl import Besides
from learner.kl import kl_penalty
from learner.losses import aggregate, policy_loss, value_loss
from learner.offload import at_work
from learner.optim import learning_rate, update
from learner.packing import MicroBatch, Packing, micro_batches
from learner.ranks import Ranks

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Counts:
    """Denominators of one optimizer update."""

    num_tokens: int  # live tokens
    num_sequences: int  # rows that have one
    scale: float  # the longest response there can be


Loss = Callable[[MicroBatch, Counts], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Trainee:
    """A model with its optimizer and its part of the config."""

    name: str  # "actor", "critic"
    module: nn.Module
    optimizer: torch.optim.Optimizer
    options: Trained

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class NotFinite(Exception):
    """A loss or gradient that must not be applied. `partly`: earlier updates of the step were."""

    def __init__(self, part: str, *, partly: bool) -> None:
        self.part, self.partly = part, partly
        super().__init__(part)


def train_on_batch(
    trainee: Trainee, batch: Batch, live: Tensor, loss: Loss, *, config: Config, lr: float, ranks: Ranks
) -> list[Metrics]:
    """All updates of one model in one step; the metrics of each.

    Raises:
        NotFinite: before anything not finite is applied.
    """
    with at_work(trainee.module, trainee.optimizer):
        return _updates(trainee, batch, live, loss, config=config, lr=lr, ranks=ranks)


def _updates(
    trainee: Trainee, batch: Batch, live: Tensor, loss: Loss, *, config: Config, lr: float, ranks: Ranks
) -> list[Metrics]:
    options = trainee.options
    tokens_of_row = live.sum(-1).cpu().numpy()  # [batch]
    done: list[Metrics] = []
    for rows in group_slices(batch, options.ppo_mini_batch_size or config.data.train_batch_size) * options.ppo_epochs:
        num_tokens = int(tokens_of_row[rows].sum())
        if num_tokens == 0:
            continue  # nothing to learn from; AdamW would move even without a gradient
        counts = Counts(num_tokens, int((tokens_of_row[rows] > 0).sum()), config.data.max_response_length)
        packing = packing_of(trainee.module, options, config)
        micros = micro_batches(batch, rows, packing, rank=ranks.data_rank, world_size=ranks.data_size)
        often = options.fsdp_config.reduce_every_micro_step
        total, metrics = accumulate(trainee.module, micros, loss, counts, ranks, reduce_often=often)
        failpoint("learner.before_optimizer")
        norm, applied = update(trainee.optimizer, trainee.parameters, loss=total, lr=lr, grad_clip=options.grad_clip)
        if not applied:
            raise NotFinite(trainee.name, partly=bool(done))
        failpoint("learner.after_optimizer")
        done.append({**metrics, f"{trainee.name}/grad_norm": norm, f"{trainee.name}/lr": torch.tensor(lr)})
    return done


def packing_of(module: nn.Module, options: Trained, config: Config) -> Packing:
    """How the config has rows of a model laid out, as far as the model allows it."""
    split = config.actor.ulysses_sequence_parallel_size
    return Packing(
        token_budget=options.ppo_max_token_len_per_gpu * split if options.use_dynamic_bsz else None,
        rows_per_forward=options.ppo_micro_batch_size_per_gpu,
        packed=config.model.use_remove_padding,
        share_prompts=options.share_prompts and module.shares_prompts,
        hidden_size=module.hidden_size,
        split=split,
    )


def accumulate(
    module: nn.Module, micros: list[MicroBatch], loss: Loss, counts: Counts, ranks: Ranks, *,
    reduce_often: bool = False,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Backward of each micro-batch; (loss, metrics) of them all, over all ranks.

    `fully_shard` averages gradients over its mesh, hence the factor: they are to be summed. Ranks that divide
    the same rows compute one loss, each the part of its gradient that is of its own tokens.

    reduce_often: in each micro-step, instead of keeping whole gradients until the last.
    """
    parts: list[Metrics] = []
    for i, micro in enumerate(micros):
        if ranks.world_size > 1:
            module.set_requires_gradient_sync(reduce_often or i == len(micros) - 1)
        value, metrics = loss(micro, counts)
        failpoint("learner.forward")
        (value * ranks.world_size).backward()
        failpoint("learner.backward")
        parts.append({"loss": value.detach(), **metrics})
    names = list(parts[0])
    sums = ranks.sum(torch.stack([torch.stack([m[k].double() for m in parts]).sum() for k in names])).unbind()
    metrics = dict(zip(names, sums, strict=True))
    return metrics.pop("loss"), metrics


def actor_loss(
    config: Config, module: nn.Module, batch: Batch, targets: Targets, settings: dict[str, float], *, step: int,
    version: int, besides: Besides | None = None,
) -> Loss:  # fmt: skip
    """Decoupled PPO, minus the entropy bonus, plus the KL to the reference.

    version: the one that is being trained, whose weights are π_θ at the start of the step.
    besides: the reference's half of each micro-batch, for the exact KL (`learner/exact_kl.py`).
    """
    options = config.actor
    mode = "seq-mean-token-sum-norm" if config.algorithm.adv_estimator == "dr_grpo" else options.loss_agg_mode
    with_entropy = settings["actor.entropy_coeff"] != 0
    kl_coef = kl_coef_of(config, settings, step)

    def loss(micro: MicroBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        rows, live = micro.rows, targets.live[micro.rows]
        denominators = {"loss_agg_mode": mode, **vars(counts)}
        beside = None if besides is None else besides(micro)
        token_logprobs, token_entropy, *token_kl = module(micro, with_entropy=with_entropy, beside=beside)
        logprobs = micro.scatter(token_logprobs)  # [n, response]
        if targets.proximal_logprobs is None:
            behavior = batch.behavior_logprobs[rows]
            proximal = loglinear_proximal(
                logprobs.detach(), behavior, batch.behavior_versions[rows], current_version=version
            )
            weights = token_weights(config, proximal, behavior, batch.mask[rows])
        else:
            proximal = targets.proximal_logprobs[rows]
            weights = None if targets.is_weights is None else targets.is_weights[rows]
        value, metrics = policy_loss(
            logprobs, proximal, targets.advantages[rows], live,
            mode=options.policy_loss.loss_mode,
            clip_ratio_low=settings["actor.clip_ratio_low"],
            clip_ratio_high=settings["actor.clip_ratio_high"],
            clip_ratio_c=options.clip_ratio_c,
            is_weights=weights, **denominators,
        )  # fmt: skip
        metrics["actor/pg_loss"] = value.detach()
        if with_entropy:
            entropy = aggregate(micro.scatter(token_entropy), live, **denominators)
            value = value - settings["actor.entropy_coeff"] * entropy
            metrics["actor/entropy_loss"] = entropy.detach()
        if options.use_kl_loss:
            if besides is None:
                penalty = kl_penalty(logprobs, targets.ref_logprobs[rows], kind=options.kl_loss_type)
            else:
                penalty = micro.scatter(*token_kl)
            kl = aggregate(penalty, live, **denominators)
            value = value + kl_coef * kl
            metrics["actor/kl_loss"] = kl.detach()
        return value, {**metrics, "actor/loss": value.detach()}

    return loss


def critic_loss(config: Config, module: nn.Module, targets: Targets) -> Loss:
    """Squared error against the returns."""
    options = config.critic

    def loss(micro: MicroBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        rows = micro.rows
        value, metrics = value_loss(
            micro.scatter(module(micro)), targets.values[rows], targets.returns[rows], targets.live[rows],
            cliprange_value=options.cliprange_value, loss_agg_mode=options.loss_agg_mode, **vars(counts),
        )  # fmt: skip
        return value, {**metrics, "critic/vf_loss": value.detach()}

    return loss


def kl_coef_of(config: Config, settings: dict[str, float], step: int) -> float:
    """Weight of the KL in the loss in training step `step`."""
    return settings["actor.kl_loss_coef"] if config.actor.use_kl_loss and kl_is_on(config, step) else 0.0


def rate_of(config: Config, name: str, settings: dict[str, float], step: int) -> float:
    """The learning rate of "actor" or "critic" in training step `step`."""
    options: Trained = getattr(config, name)
    return learning_rate(options.optim, step, max_steps=config.run.max_steps, peak=settings[f"{name}.optim.lr"])
