"""Off-policy correction: what the drift between sampler and learner does to a token's weight.

All start from ρ_t = π_prox / μ on the sampled tokens: π_prox is the policy at the start of the
step, μ the one that sampled. Tensors are `[batch, response]`; nothing here has a gradient. What
is under the mask changes nothing; a NaN on a live token gives a NaN weight and is not rejected,
so that it reaches the loss and the step is skipped.
"""

import math

import torch
from torch import Tensor

from common.thresholds import parse_rejection, parse_threshold

EPS = 1e-8  # an empty row has a mean of 0
MAX_LOG_RATIO = 20.0  # weights stay within e^±20


def _log_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor, live: Tensor) -> Tensor:
    return (proximal_logprobs - behavior_logprobs).detach().masked_fill(~live, 0)


def _row_mean(x: Tensor, live: Tensor) -> Tensor:
    """Mean over a row's live tokens, [batch, 1]; x is 0 elsewhere."""
    return x.sum(-1, keepdim=True) / (live.sum(-1, keepdim=True) + EPS)


@torch.no_grad()
def importance_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    threshold: float | str,
) -> Tensor:
    """Truncated importance weights w = min(ρ, C).

        token       ρ_t
        sequence    Π_t ρ_t              on every token of the row
        geometric   (Π_t ρ_t)^(1/|y|)    on every token of the row

    proximal_logprobs, behavior_logprobs, response_mask: [batch, response].
    threshold: C; `"lo_hi"` sets weights outside the bounds to 0 instead; inf does not truncate.
    Returns [batch, response], 0 under the mask.

    Sources: Ionides 2008 (truncation); Espeholt et al. 2018 (token weights, ρ̄); Liu, Li et al.
    2025, "When speed kills stability" (the levels, for LLMs).
    Bias: sequence weights none without truncation, and a variance exponential in the length;
    token weights leave prefixes and continuations distributed as under μ; geometric ones are
    not the weights of any expectation, but stay near 1; truncation pulls towards μ's gradient.
    """
    lower, upper = parse_threshold(threshold)
    live = response_mask.bool()
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs, live)
    if level == "token":
        log_weights = log_ratio
    elif level == "sequence":
        log_weights = log_ratio.sum(-1, keepdim=True)
    elif level == "geometric":
        log_weights = _row_mean(log_ratio, live)
    else:
        raise ValueError(f"unknown level {level!r}: choose from token, sequence, geometric")
    weights = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if lower is None:
        weights = weights.clamp(max=upper)
    else:
        weights = weights.masked_fill((weights < lower) | (weights > upper), 0)
    return weights.expand_as(log_ratio).masked_fill(~live, 0)


@torch.no_grad()
def rejection_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    response_mask: Tensor,
    *,
    mode: str,
    threshold: float | str,
) -> Tensor:
    """The mask without tokens, or rows, that drifted too far to be corrected.

        k1 = −log ρ,   k2 = ½ (log ρ)²,   k3 = ρ − 1 − log ρ        (log ρ within ±20)

        token_k*            keeps the tokens whose k is within the bounds
        seq_{sum,mean}_k*   keeps the rows whose sum or mean of k is within the bounds
        seq_max_k*          keeps the rows whose largest k is within the bounds
        icepop              keeps the tokens with lo ≤ ρ ≤ hi

    For k1 the bounds are those of e^k1 = 1/ρ: `"lo_hi"`, or `u` for `"1/u_u"`; for k2 and k3 one
    upper bound of k. Several modes joined by commas (thresholds alike) must all be satisfied.

    proximal_logprobs, behavior_logprobs, response_mask: [batch, response].
    Returns [batch, response] of the mask's type.
    Sources: the modes, Liu, Li et al. 2025 (see `importance_weights`); IcePop, Ling Team 2025.
    Bias: that of leaving out what the two policies disagree on most.
    """
    live = response_mask.bool()
    log_ratio = _log_ratio(proximal_logprobs, behavior_logprobs, live)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rejected = torch.zeros_like(live)
    for name, lower, upper in parse_rejection(mode, threshold):
        if name == "icepop" or name.endswith("_k1"):
            lower, upper = math.log(lower), math.log(upper)
        drift = _drift(name, log_ratio, live)  # [batch, response] or [batch, 1]
        rejected |= (drift < lower) | (drift > upper)  # both false for NaN
    return response_mask.masked_fill(rejected, 0)


def _drift(mode: str, log_ratio: Tensor, live: Tensor) -> Tensor:
    if mode == "icepop":
        return log_ratio
    level, _, estimator = mode.rpartition("_")
    k = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio.square(),
        "k3": log_ratio.exp() - 1 - log_ratio,
    }[estimator]
    if level == "token":
        return k
    if level == "seq_max":  # k2, k3 ≥ 0, and 0 under the mask
        return k.amax(-1, keepdim=True)
    return k.sum(-1, keepdim=True) if level == "seq_sum" else _row_mean(k, live)


@torch.no_grad()
def loglinear_proximal(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    behavior_versions: Tensor,
    *,
    current_version: int,
) -> Tensor:
    """A proximal policy without a forward pass: between μ and π_θ in log space (A-3PO 2025).

        log π_prox = α log μ + (1 − α) log π_θ,   α = 1/d,   d = current version − μ's version

    and α = 0 for d = 0, where π_prox is π_θ itself. The older a token, the nearer to π_θ.

    logprobs, behavior_logprobs: [batch, response]; behavior_versions: [batch, response], the
    version that sampled each token. Returns [batch, response], detached.
    Bias: not normalised, so not a policy; it stands in for one only in ratios.
    """
    lag = current_version - behavior_versions
    alpha = torch.where(lag > 0, 1 / lag.clamp(min=1), 0).to(logprobs.dtype)
    return torch.lerp(logprobs, behavior_logprobs.to(logprobs.dtype), alpha)


@torch.no_grad()
def offpolicy_metrics(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """How far μ and π_prox are apart on the sampled tokens; scalar tensors in float64.

    Means over tokens: `kl` (of log μ − log π_prox: KL(μ ‖ π_prox)), `k3_kl` (the same with less
    variance), `chi2_token` (ρ² − 1). Means over rows that have a live token, with the row's
    mean log-probability: `training_ppl`, `rollout_ppl` (perplexities), `*_log_ppl`,
    `log_ppl_diff` (training minus rollout) and its `abs`, `max`, `min`, `ppl_ratio`;
    `chi2_seq` ((Π_t ρ_t)² − 1). Without a live token all are 0.

    proximal_logprobs, behavior_logprobs, response_mask: [batch, response].
    """
    live = response_mask.bool()
    rows = live.any(-1, keepdim=True)  # [batch, 1]
    proximal = proximal_logprobs.double().masked_fill(~live, 0)
    behavior = behavior_logprobs.double().masked_fill(~live, 0)
    log_ratio = proximal - behavior
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    row_log_ratio = log_ratio.sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training_log_ppl = -_row_mean(proximal, live)
    rollout_log_ppl = -_row_mean(behavior, live)
    difference = training_log_ppl - rollout_log_ppl
    return {
        "training_ppl": _mean_of(training_log_ppl.exp(), rows),
        "training_log_ppl": _mean_of(training_log_ppl, rows),
        "kl": _mean_of(-log_ratio, live),
        "k3_kl": _mean_of(log_ratio.exp() - log_ratio - 1, live),
        "rollout_ppl": _mean_of(rollout_log_ppl.exp(), rows),
        "rollout_log_ppl": _mean_of(rollout_log_ppl, rows),
        "log_ppl_diff": _mean_of(difference, rows),
        "log_ppl_abs_diff": _mean_of(difference.abs(), rows),
        "log_ppl_diff_max": _max_of(difference, rows),
        "log_ppl_diff_min": -_max_of(-difference, rows),
        "ppl_ratio": _mean_of(difference.exp(), rows),
        "chi2_token": _mean_of((2 * bounded).exp() - 1, live),
        "chi2_seq": _mean_of((2 * row_log_ratio).exp() - 1, rows),
    }


def _mean_of(x: Tensor, selected: Tensor) -> Tensor:
    return x.masked_fill(~selected, 0).sum() / selected.sum().clamp(min=1)


def _max_of(x: Tensor, selected: Tensor) -> Tensor:
    if not x.numel():
        return x.new_zeros(())
    return torch.where(selected.any(), x.masked_fill(~selected, -math.inf).max(), 0)
