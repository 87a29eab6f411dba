"""Losses: what the optimizer minimises, written as the papers write it.

Tensors are `[batch, response]`. Each loss is made per token and then aggregated; the aggregation
takes the denominators of the whole optimizer step, so that the losses of micro-batches (and of
ranks) add up to the loss of the batch, and their gradients to its gradient. Metrics add up the
same way. Left out, the denominators are those of the rows at hand.

What is under the mask, NaN and inf too, changes neither a loss nor a gradient; a NaN on a live
token makes the loss NaN.
"""

import math

import torch
from torch import Tensor

EPS = 1e-8  # an empty row has a mean of 0
MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0

Count = Tensor | float | None


def aggregate(
    token_losses: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str,
    num_tokens: Count = None,
    num_sequences: Count = None,
    scale: float | None = None,
) -> Tensor:
    """One number from the losses of tokens.

    With N live tokens, S rows that have one, and L_i = Σ_t m_it ℓ_it:

        token-mean                 Σ_i L_i / N                every token counts alike (DAPO)
        seq-mean-token-sum         1/S Σ_i L_i                a long response counts more
        seq-mean-token-mean        1/S Σ_i L_i / |m_i|        every response counts alike (GRPO)
        seq-mean-token-sum-norm    1/S Σ_i L_i / scale        a constant in place of the length
                                                              (Dr. GRPO)

    token_losses, response_mask: [batch, response] → scalar.
    num_tokens, num_sequences: N and S of the whole step, counted after all masks.
    scale: the longest response there can be; by default the width of the mask.
    Bias: seq-mean-token-mean weighs a token by 1/length, which favours short right answers and
    long wrong ones; token-mean has the (random) N in the denominator.
    """
    assert token_losses.shape == response_mask.shape, (token_losses.shape, response_mask.shape)
    live = response_mask.bool()
    row_losses = token_losses.masked_fill(~live, 0).sum(-1)  # [batch]
    if loss_agg_mode == "token-mean":
        return row_losses.sum() / _at_least_one(live.sum() if num_tokens is None else num_tokens)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / (live.sum(-1) + EPS)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        row_losses = row_losses / (live.shape[-1] if scale is None else scale)
    elif loss_agg_mode != "seq-mean-token-sum":
        raise ValueError(f"unknown loss_agg_mode {loss_agg_mode!r}")
    num_live_rows = live.any(-1).sum() if num_sequences is None else num_sequences
    return row_losses.sum() / _at_least_one(num_live_rows)


def _at_least_one(count: Tensor | float) -> Tensor:
    return torch.as_tensor(count).clamp(min=1)


def _mean(x: Tensor, live: Tensor, num_tokens: Count) -> Tensor:
    """A metric's mean over the live tokens: like the loss, a part of the step's."""
    x = x.detach().to(torch.float32) if x.dtype is torch.bool else x.detach()
    return aggregate(x, live, loss_agg_mode="token-mean", num_tokens=num_tokens)


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    mode: str,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    loss_agg_mode: str,
    is_weights: Tensor | None = None,
    num_tokens: Count = None,
    num_sequences: Count = None,
    scale: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled policy objective: −w_t · (clipped surrogate of r_t and A_t), aggregated.

        r_t = π_θ / π_prox     how far this step has moved the policy; clipped
        w_t = π_prox / μ       how far the sampler lags behind; `is_weights`, no gradient

    logprobs, proximal_logprobs, advantages, response_mask, is_weights: [batch, response]; log
    π_θ (with gradient), log π_prox, A, m, w.
    mode: `vanilla` (PPO with dual clip), `gspo`, `cispo`; the functions below have the equations.
    Returns (loss, metrics): `actor/pg_clipfrac`, `actor/ppo_kl` (mean of −log r), and
    `actor/pg_clipfrac_lower` (share of tokens at the dual clip), as scalar tensors.

    Source of the decoupling: Hilton et al. 2022, "Batch size-invariance for policy optimization";
    AReaL (Fu et al. 2025). Without `is_weights` it is PPO with π_prox as the old policy.
    Bias: at r = 1 the gradient is E_μ[w A ∇log π_θ]: the policy gradient for exact sequence
    weights; for token weights that of prefixes and continuations drawn from μ; clips on top.
    """
    assert logprobs.shape == response_mask.shape, (logprobs.shape, response_mask.shape)
    if mode not in _SURROGATES:
        raise ValueError(f"unknown policy loss {mode!r}: choose from {', '.join(_SURROGATES)}")
    live = response_mask.bool()
    token_losses, log_ratio, clipped, clipped_lower = _SURROGATES[mode](
        logprobs.masked_fill(~live, 0),
        proximal_logprobs.detach().masked_fill(~live, 0),
        advantages.detach().masked_fill(~live, 0),
        live,
        clip_ratio_low,
        clip_ratio_high,
        clip_ratio_c,
    )
    if is_weights is not None:
        token_losses = token_losses * is_weights.detach()
    loss = aggregate(
        token_losses,
        live,
        loss_agg_mode=loss_agg_mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        scale=scale,
    )
    return loss, {
        "actor/pg_clipfrac": _mean(clipped, live, num_tokens),
        "actor/ppo_kl": _mean(-log_ratio, live, num_tokens),
        "actor/pg_clipfrac_lower": _mean(clipped_lower, live, num_tokens),
    }


Surrogate = tuple[Tensor, Tensor, Tensor, Tensor]  # token losses, log r, clipped, at dual clip


def _vanilla(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    live: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> Surrogate:
    """PPO (Schulman et al. 2017, eq. 7) with the dual clip (Ye et al. 2020).

        ℓ = −min(r A, clip(r, 1−ε_low, 1+ε_high) A)       A ≥ 0
        ℓ = min(−c A, the same)                           A < 0

    Different ε above and below: DAPO's clip-higher (Yu et al. 2025). log r is held to ±20.
    """
    log_ratio = (logprobs - proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    pessimistic = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    return losses, log_ratio, clipped > unclipped, negative & (pessimistic > ceiling)


def _gspo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    live: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> Surrogate:
    """GSPO in its per-token form (Zheng et al. 2025, §4.3): one ratio for the whole response.

        s = (Π_t r_t)^(1/|y|),   s_t = sg[s] · π_θ / sg[π_θ]
        ℓ = −min(s_t A, clip(s_t, 1−ε_low, 1+ε_high) A)

    log s is held to ≤ 10. The dual clip has no part in it. With `seq-mean-token-mean` it is the
    paper's objective.
    """
    log_ratio = logprobs - proximal_logprobs
    row_log_ratio = log_ratio.sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1)
    log_sequence_ratio = row_log_ratio.detach() + logprobs - logprobs.detach()
    ratio = log_sequence_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    return losses, log_ratio, clipped > unclipped, torch.zeros_like(live)


def _cispo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    live: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> Surrogate:
    """CISPO (MiniMax-M1 2025): REINFORCE with a clipped weight; no token loses its gradient.

        ℓ = −sg[clip(r, 1−ε_low, 1+ε_high)] A log π_θ

    log r is held to ±20. The dual clip has no part in it.
    """
    log_ratio = (logprobs - proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight.detach() * advantages * logprobs
    return losses, log_ratio, ratio != weight, torch.zeros_like(live)


_SURROGATES = {"vanilla": _vanilla, "gspo": _gspo, "cispo": _cispo}


def value_loss(
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float | None,
    loss_agg_mode: str = "token-mean",
    num_tokens: Count = None,
    num_sequences: Count = None,
    scale: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the critic, pessimistic about steps larger than the clip range.

        ℓ = ½ max( (V_θ − R)², (clip(V_θ, V−ε, V+ε) − R)² )

    vpreds, values, returns, response_mask: [batch, response]; V_θ (with gradient), V of the start
    of the step, R, m. `cliprange_value=None` is the plain squared error.
    Returns (loss, metrics): `critic/vf_clipfrac` (share of tokens whose gradient the clip took),
    `critic/vpred_mean`, as scalar tensors.
    Source: the PPO implementation of OpenAI baselines (no paper). Bias: the clip slows the critic.
    """
    live = response_mask.bool()
    vpreds, values, returns = (x.masked_fill(~live, 0) for x in (vpreds, values, returns))
    values, returns = values.detach(), returns.detach()
    bound = math.inf if cliprange_value is None else cliprange_value
    near = vpreds.clamp(values - bound, values + bound)
    unclipped = (vpreds - returns).square()
    clipped = (near - returns).square()
    loss = aggregate(
        0.5 * torch.maximum(unclipped, clipped),
        live,
        loss_agg_mode=loss_agg_mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        scale=scale,
    )
    return loss, {
        "critic/vf_clipfrac": _mean(clipped > unclipped, live, num_tokens),
        "critic/vpred_mean": _mean(vpreds, live, num_tokens),
    }
