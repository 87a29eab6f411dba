"""Metrics of a step. Everything stays a tensor until `numbers`, the logging boundary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from learner.batch import Batch
from learner.correction import offpolicy_metrics
from learner.estimates import StartOfStep, Targets

Metrics = dict[str, Tensor]


class Clock:
    """Seconds spent in the named phases of a step, and when they were."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def numbers(metrics: Metrics) -> dict[str, float]:
    """Scalar tensors → floats, in one transfer."""
    if not metrics:
        return {}
    values = torch.stack([v.detach().double().reshape(()) for v in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def mean_of_updates(updates: list[Metrics]) -> Metrics:
    """Mean over the optimizer updates of a step."""
    return {k: torch.stack([u[k].float() for u in updates]).mean() for k in updates[0]} if updates else {}


def batch_metrics(batch: Batch, *, version: int, max_prompt_length: int, max_response_length: int) -> Metrics:
    """Scores, raw lengths (before any mask), ages."""
    sampled = batch.mask
    responses = torch.from_numpy(batch.response_lengths).float()
    prompts = torch.from_numpy(batch.prompt_lengths).float()
    age = version - batch.behavior_versions  # [batch, response]
    there = torch.arange(sampled.shape[1]) < responses.unsqueeze(-1)
    newest = batch.behavior_versions.masked_fill(~there.to(sampled.device), -1).amax(-1)
    oldest = batch.behavior_versions.masked_fill(~there.to(sampled.device), 1 << 62).amin(-1)
    return {
        **_spread("critic/score", batch.scores),
        **_spread("response_length", responses),
        "response_length/clip_ratio": batch.truncated.float().mean(),
        **_spread("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts >= max_prompt_length).float().mean(),
        "staleness/mean": age[sampled].float().mean(),
        "staleness/max": (version - oldest).amax(),
        "staleness/num_multi_version_samples": (newest > oldest).sum(),
    }


def target_metrics(targets: Targets, sampled: Tensor) -> Metrics:
    """Rewards, advantages, and with a critic values and returns."""
    live = targets.live
    metrics = {
        **_spread("critic/rewards", targets.token_rewards.masked_fill(~sampled, 0).sum(-1)),
        **_spread("critic/advantages", targets.advantages[live]),
    }
    if targets.returns is not None:
        returns = targets.returns[live]
        metrics |= _spread("critic/returns", returns)
        if targets.values is not None:
            values = targets.values[live]
            metrics |= _spread("critic/values", values)
            metrics["critic/vf_explained_var"] = 1 - _variance(returns - values) / (_variance(returns) + 1e-5)
    return metrics


def drift_metrics(batch: Batch, start: StartOfStep, targets: Targets, *, version: int) -> Metrics:
    """How far sampler and learner are apart, before the first update.

    `logprob_diff_max` is over tokens sampled by exactly the version being trained, where anything
    but rounding is a fault.
    """
    metrics: Metrics = {}
    proximal = start.proximal_logprobs
    if proximal is not None:
        drift = offpolicy_metrics(proximal, batch.behavior_logprobs, batch.mask)
        metrics = {f"rollout_corr/{k}": v for k, v in drift.items()}
        same = batch.mask & (batch.behavior_versions == version)
        difference = (proximal - batch.behavior_logprobs).abs().masked_fill(~same, 0)
        metrics["rollout_corr/logprob_diff_max"] = difference.amax()
        metrics["rollout_corr/num_same_version_tokens"] = same.sum()
    if targets.is_weights is not None:
        weights = targets.is_weights[batch.mask]
        metrics |= _spread("rollout_corr/rollout_is", weights)
        metrics["rollout_corr/rollout_is_std"] = _variance(weights).sqrt()
        metrics["rollout_corr/rollout_is_eff_sample_size"] = weights.sum().square() / (
            len(weights) * weights.square().sum()
        ).clamp(min=1e-8)
    num_sampled = batch.mask.sum()
    metrics["rollout_corr/rollout_rs_masked_fraction"] = 1 - targets.live.sum() / num_sampled
    if start.entropy is not None:
        metrics["actor/entropy"] = start.entropy.masked_fill(~batch.mask, 0).sum() / num_sampled
    return metrics


def _spread(name: str, values: Tensor) -> Metrics:
    if not values.numel():
        values = torch.zeros(1)
    slash = "_" if name == "rollout_corr/rollout_is" else "/"
    return {
        f"{name}{slash}mean": values.mean(),
        f"{name}{slash}max": values.amax(),
        f"{name}{slash}min": values.amin(),
    }


def _variance(x: Tensor) -> Tensor:
    return (x - x.mean()).square().mean() if x.numel() else torch.zeros(())
