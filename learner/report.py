"""Metrics of a step. Everything stays a tensor until `numbers`, the logging boundary."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from common.config import Config
from learner.batch import Batch
from learner.correction import offpolicy_metrics
from learner.estimates import StartOfStep, Targets
from learner.packing import MicroBatch
from learner.progress import Progress
from learner.ranks import Ranks

Metrics = dict[str, Tensor]
LARGE = 1 << 62
MAX_PARTS = 32


class Clock:
    """Seconds spent in the named phases of a step, and when they were.

    A phase ends when the device has done its work, else it would be charged to whichever phase waits next. So the
    device runs dry for a moment between phases: some ten times a step.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @property
    def total_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def numbers(metrics: Metrics) -> dict[str, float]:
    """Scalar tensors → floats, in one transfer."""
    if not metrics:
        return {}
    device = next((v.device for v in metrics.values() if v.device.type != "cpu"), torch.device("cpu"))
    values = torch.stack([v.detach().to(device, torch.float64).reshape(()) for v in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def of_updates(name: str, updates: list[Metrics]) -> Metrics:
    """Means over the optimizer updates of one model in a step, and how many there were."""
    if not updates:
        return {}
    metrics = {k: torch.stack([u[k].float() for u in updates]).mean() for k in updates[0]}
    if name == "actor":
        metrics["actor/grad_norm_max"] = torch.stack([u["actor/grad_norm"] for u in updates]).amax()
        metrics["actor/num_updates"] = torch.tensor(len(updates))
    return metrics


def batch_metrics(batch: Batch, *, version: int, limit: int, config: Config) -> Metrics:
    """Scores, raw lengths (before any mask), ages."""
    sampled = batch.mask
    responses = torch.from_numpy(batch.response_lengths).float().to(sampled.device)
    prompts = torch.from_numpy(batch.prompt_lengths).float().to(sampled.device)
    there = torch.arange(sampled.shape[1], device=sampled.device) < responses.unsqueeze(-1)
    oldest = batch.behavior_versions.masked_fill(~there, LARGE).amin(-1)  # [batch]
    newest = batch.behavior_versions.masked_fill(~there, -1).amax(-1)
    young = batch.young(version, limit)
    age = (version - batch.behavior_versions)[young].float()  # [tokens]
    oldest_age = (version - batch.behavior_versions).masked_fill(~young, 0).amax(-1)  # [batch]
    mixed = (newest > oldest).float()
    return {
        **_spread("critic/score/", batch.scores),
        **_reward_parts(batch),
        "critic/groups_without_signal": _share_without_signal(batch),
        **_spread("response_length/", responses),
        "response_length/clip_ratio": (responses >= config.data.max_response_length).float().mean(),
        **_spread("prompt_length/", prompts),
        "prompt_length/clip_ratio": (prompts >= config.data.max_prompt_length).float().mean(),
        **_spread("staleness/", age),
        "staleness/fresh_fraction": (age == 0).float().mean(),
        "staleness/masked_fraction": 1 - young.sum() / sampled.sum(),
        "staleness/group_age_mean": _mean_over_groups(oldest_age, batch),
        "staleness/mixed_samples": mixed.mean(),
        "staleness/num_multi_version_samples": mixed.sum(),
        "perf/total_num_tokens": torch.tensor(batch.num_tokens),
        "perf/num_response_tokens": responses.sum(),
    }


def _reward_parts(batch: Batch) -> Metrics:
    """Of the samples that have the part; the first `MAX_PARTS` names."""
    values: dict[str, list[float]] = {}
    for parts in batch.reward_parts:
        for name, value in parts.items():
            values.setdefault(name.replace("/", "_"), []).append(value)
    shown = sorted(values)[:MAX_PARTS]
    return {k: v for name in shown for k, v in _spread(f"reward_parts/{name}/", torch.tensor(values[name])).items()}


def _mean_over_groups(ages: Tensor, batch: Batch) -> Tensor:
    """Mean over groups of the largest of `ages` [batch] in each."""
    groups, number = batch.group_ids.unique(return_inverse=True)
    largest = torch.zeros(len(groups), dtype=ages.dtype, device=ages.device)
    return largest.scatter_reduce(0, number, ages, reduce="amax", include_self=True).double().mean()


def _share_without_signal(batch: Batch) -> Tensor:
    groups, number = batch.group_ids.unique(return_inverse=True)
    ends = [
        torch.zeros(len(groups), device=number.device).scatter_reduce(
            0, number, batch.scores, reduce=reduce, include_self=False
        )
        for reduce in ("amax", "amin")
    ]
    return (ends[0] == ends[1]).float().mean()


def packing_metrics(batch: Batch, micros: list[MicroBatch], ranks: Ranks) -> Metrics:
    """Of forward passes: tokens processed on all ranks per token there is, and micro-steps of each rank."""
    processed = ranks.sum(torch.tensor(float(sum(m.input_ids.numel() for m in micros)), device=ranks.device))
    return {
        "perf/padding_ratio": processed / max(1, batch.num_tokens),
        "perf/num_micro_batches": torch.tensor(len(micros)),
    }


def target_metrics(targets: Targets, sampled: Tensor) -> Metrics:
    """Rewards, advantages, and with a critic values and returns."""
    live = targets.live
    metrics = {
        **_spread("critic/rewards/", targets.token_rewards.masked_fill(~sampled, 0).sum(-1)),
        **_spread("critic/advantages/", targets.advantages[live]),
    }
    if targets.returns is not None:
        returns = targets.returns[live]
        metrics |= _spread("critic/returns/", returns)
        if targets.values is not None:
            values = targets.values[live]
            metrics |= _spread("critic/values/", values)
            metrics["critic/vf_explained_var"] = 1 - _variance(returns - values) / (_variance(returns) + 1e-5)
    return metrics


def drift_metrics(
    batch: Batch, start: StartOfStep, targets: Targets, *, version: int, young: Tensor
) -> Metrics:  # fmt: skip
    """How far sampler and learner are apart, before the first update.

    Drift is over the sampled tokens; weights and entropy, which act on the loss, over the live ones.
    `logprob_diff_max` is over tokens sampled by exactly the version being trained, where anything
    but rounding is a fault.

    young: [batch, response] bool, the sampled tokens that the staleness limit left to rejection.
    """
    metrics: Metrics = {}
    proximal, live = start.proximal_logprobs, targets.live
    if proximal is not None:
        drift = offpolicy_metrics(proximal, batch.behavior_logprobs, batch.mask)
        metrics = {f"rollout_corr/{k}": v for k, v in drift.items()}
        same = batch.mask & (batch.behavior_versions == version)
        difference = (proximal - batch.behavior_logprobs).abs().masked_fill(~same, 0)
        metrics["rollout_corr/logprob_diff_max"] = difference.amax()
        metrics["rollout_corr/logprob_diff_mean"] = difference.sum() / same.sum().clamp(min=1)
        metrics["rollout_corr/num_same_version_tokens"] = same.sum()
    if targets.is_weights is not None:
        weights = targets.is_weights[live]
        metrics |= _spread("rollout_corr/rollout_is_", weights)
        metrics["rollout_corr/rollout_is_std"] = _variance(weights).sqrt()
        metrics["rollout_corr/rollout_is_eff_sample_size"] = weights.sum().square() / (
            len(weights) * weights.square().sum()
        ).clamp(min=1e-8)
    metrics["rollout_corr/rollout_rs_masked_fraction"] = _share_lost(young, live)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _share_lost(young.any(-1), live.any(-1))
    if start.entropy is not None:
        metrics["actor/entropy"] = start.entropy.masked_fill(~live, 0).sum() / live.sum().clamp(min=1)
    return metrics


def _share_lost(before: Tensor, after: Tensor) -> Tensor:
    return 1 - after.sum() / before.sum().clamp(min=1)


def time_metrics(clock: Clock, batch: Batch) -> dict[str, float]:
    """Where the time of a step went; all of it since the clock was made."""
    step_s, claim_s = clock.total_s, clock.seconds.get("claim", 0.0)
    memory = {}
    if torch.cuda.is_available():
        memory = {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
    return memory | {
        **{f"timing_s/{name}": s for name, s in clock.seconds.items()},
        "timing_s/step": step_s,
        "perf/time_per_step": step_s,
        "perf/throughput": batch.num_tokens / step_s,
        "perf/cpu_memory_used_gb": _resident_bytes() / 1e9,
        "queue/wait_s": claim_s,
        "trainer/idle_ratio": claim_s / step_s,
    }


def progress_metrics(p: Progress, config: Config) -> dict[str, float]:
    values: dict[str, float] = {
        "training/global_step": p.step,
        "training/version": p.version,
        "training/skipped_steps": p.skipped,
        "training/samples_trained": p.samples_trained,
        "training/tokens_trained": p.tokens_trained,
    }
    if config.truncates_sampling:
        values["rollout_corr/truncated_sampling"] = 1
    if (mean := p.goal_mean(config.run.goal_window)) is not None:
        values["training/goal_mean"] = mean
    return values


def broker_metrics(stats: dict[str, Any]) -> dict[str, float]:
    """The broker's figures: groups per state and dropped by reason; the rest has metrics' names already."""
    values = {f"queue/{state}": n for state, n in stats.get("states", {}).items()}
    values |= {f"queue/dropped/{reason}": n for reason, n in stats.get("dropped", {}).items()}
    return values | {name: v for name, v in stats.items() if "/" in name and isinstance(v, (int, float))}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _spread(prefix: str, values: Tensor) -> Metrics:
    if not values.numel():
        values = torch.zeros(1)
    return {f"{prefix}mean": values.mean(), f"{prefix}max": values.amax(), f"{prefix}min": values.amin()}


def _variance(x: Tensor) -> Tensor:
    return (x - x.mean()).square().mean() if x.numel() else torch.zeros(())
