"""From log-probabilities and scores to what the losses need: live mask, weights, advantages.

The middle of a step, on `[batch, response]` tensors of the whole batch. Two masks: the *sampled*
mask (`batch.mask`) of all tokens that the policy drew, and the *live* mask, what rejection and
staleness leave of it. Scores and the backward recursions run over the sampled one; group
statistics, whitening and losses use the live one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from learner import advantages as adv
from learner.batch import Batch
from learner.correction import importance_weights, rejection_mask
from learner.kl import AdaptiveKLController, FixedKLController, kl_penalty

KLController = FixedKLController | AdaptiveKLController
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")


@dataclass(frozen=True)
class StartOfStep:
    """What the models say of the sampled tokens before the first update. [batch, response], 0 elsewhere."""

    proximal_logprobs: Tensor | None  # None: `bypass` and `loglinear` make no forward pass for it
    entropy: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None


@dataclass(frozen=True)
class Targets:
    """What the updates of a step aim at. [batch, response]."""

    live: Tensor  # bool
    proximal_logprobs: Tensor | None  # None: made in each update (`loglinear`)
    is_weights: Tensor | None
    token_rewards: Tensor  # scores at the last sampled token, minus the KL in the reward
    advantages: Tensor
    returns: Tensor | None
    values: Tensor | None
    ref_logprobs: Tensor | None


def make_kl_controller(config: Config) -> KLController:
    ctrl = config.algorithm.kl_ctrl
    if ctrl.type == "adaptive":
        return AdaptiveKLController(ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
    return FixedKLController(ctrl.kl_coef)


def kl_is_on(config: Config, step: int) -> bool:
    """False in the warm-up, the first share of steps without any KL term."""
    return step > config.algorithm.kl_warmup_ratio * config.run.max_steps


def make_targets(
    config: Config, batch: Batch, start: StartOfStep, *, kl_controller: KLController, step: int, young: Tensor
) -> tuple[Targets, dict[str, Tensor]]:
    """Correction, then rewards, then advantages. Returns the targets and metrics (scalar tensors).

    young: [batch, response] bool, the sampled tokens that the staleness limit leaves in.
    Updates the KL controller if the KL is in the reward.
    """
    proximal = proximal_logprobs(config, batch, start)
    is_weights, live = correction(config, batch, proximal, young)
    rewards, metrics = token_rewards(config, batch, start, kl_controller, step)
    advantages, returns = estimate_advantages(config, batch, rewards, live, start.values)
    targets = Targets(live, proximal, is_weights, rewards, advantages, returns, start.values, start.ref_logprobs)
    return targets, metrics


def proximal_logprobs(config: Config, batch: Batch, start: StartOfStep) -> Tensor | None:
    """The clip anchor π_prox: recomputed, := behavior, or None (`loglinear`: it moves with π_θ)."""
    if config.algorithm.proximal == "bypass":
        return batch.behavior_logprobs
    return start.proximal_logprobs if config.algorithm.proximal == "recompute" else None


def correction(
    config: Config, batch: Batch, proximal: Tensor | None, young: Tensor
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """(importance weights or None, live mask). What rejection says of a row takes in all its sampled tokens."""
    options = config.algorithm.rollout_correction
    live = young
    if proximal is None:
        return None, live
    if options.rollout_rs is not None:
        live = young & rejection_mask(
            proximal,
            batch.behavior_logprobs,
            batch.mask,
            mode=options.rollout_rs,
            threshold=options.rollout_rs_threshold,
        )
    return token_weights(config, proximal, batch.behavior_logprobs, batch.mask), live


def token_weights(config: Config, proximal: Tensor, behavior: Tensor, sampled: Tensor) -> Tensor | None:
    """w = min(π_prox/μ, C) as configured; the ratio of a row takes in all its sampled tokens."""
    options = config.algorithm.rollout_correction
    if options.rollout_is is None:
        return None
    return importance_weights(
        proximal, behavior, sampled, level=options.rollout_is, threshold=options.rollout_is_threshold
    )


def token_rewards(
    config: Config, batch: Batch, start: StartOfStep, kl_controller: KLController, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """[batch, response]: the score on the last sampled token, minus β · KL to the reference on each.

    The overlong penalty (DAPO), if enabled, is part of the score.
    """
    rewards = on_last_token(less_overlong(config, batch.scores, batch.response_lengths), batch.mask)
    if not config.algorithm.use_kl_in_reward:
        return rewards, {}
    policy = batch.behavior_logprobs if start.proximal_logprobs is None else start.proximal_logprobs
    kl = kl_penalty(policy, start.ref_logprobs, kind=config.algorithm.kl_penalty).masked_fill(~batch.mask, 0)
    on = kl_is_on(config, step)
    coef = kl_controller.value if on else 0.0
    current = (kl.sum(-1) / batch.mask.sum(-1).clamp(min=1)).mean()  # mean over rows of the mean over tokens
    if on and isinstance(kl_controller, AdaptiveKLController):
        kl_controller.update(current.item(), len(batch))
    return rewards - coef * kl, {
        "actor/reward_kl_penalty": current,
        "actor/reward_kl_penalty_coeff": torch.tensor(coef),
    }


def less_overlong(config: Config, scores: Tensor, num_tokens: NDArray[np.int64]) -> Tensor:
    """[batch]: scores of responses of so many tokens, with the overlong penalty if it is enabled."""
    overlong = config.reward.overlong_buffer
    if not overlong.enable:
        return scores
    return scores + adv.overlong_penalty(
        torch.from_numpy(num_tokens).to(scores.device),
        max_response_length=config.data.max_response_length,
        buffer_tokens=overlong.len,
        penalty_factor=overlong.penalty_factor,
    )


def on_last_token(row_values: Tensor, mask: Tensor) -> Tensor:
    """[batch] → [batch, response]: each value on the last token of its row's mask, nowhere in an empty row."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)  # [batch, 1]
    return torch.where(mask & (columns == last), row_values.unsqueeze(-1), 0)


def estimate_advantages(
    config: Config, batch: Batch, rewards: Tensor, live: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(advantages, returns or None), [batch, response]."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    if name in GROUP_ESTIMATORS:
        # A rejected last token must not take the row's score with it.
        row_rewards = on_last_token(rewards.masked_fill(~batch.mask, 0).sum(-1), live)
        if name == "rloo":
            return adv.rloo(row_rewards, live, batch.group_ids), None
        norm_by_std = name == "grpo" and algorithm.norm_adv_by_std_in_grpo
        return adv.grpo(row_rewards, live, batch.group_ids, norm_by_std=norm_by_std), None
    if name == "gae":
        raw, returns = adv.gae(rewards, values, batch.mask, gamma=algorithm.gamma, lam=algorithm.lam, whiten=False)
    elif name == "remax":
        assert batch.baselines is not None and batch.baseline_lengths is not None
        baselines = less_overlong(config, batch.baselines, batch.baseline_lengths)
        return adv.remax(rewards, baselines, batch.mask), None
    elif name == "reinforce_plus_plus":
        raw, returns = adv.reinforce_plus_plus(rewards, batch.mask, gamma=algorithm.gamma, whiten=False)
    else:
        raise ValueError(f"advantage estimator {name!r}")
    return adv.whiten(raw, live), returns
