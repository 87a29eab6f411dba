"""Distance to the reference policy: estimators per token, the exact sum, and its coefficient.

    KL(π ‖ π_ref) = E_{y~π} [ log π(y) − log π_ref(y) ]

With x = log π(y) − log π_ref(y) on a sampled token y ~ π (Schulman 2020, "Approximating KL
divergence"):

    k1 = x            unbiased value, high variance
    k2 = x²/2         biased value, right gradient
    k3 = e^−x + x − 1 unbiased value, low variance, never negative

As a loss, only the gradient counts, and there the roles change; see `kl_penalty`.
"""

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # k3: e^20 is still far from overflow, in float32 too
MAX_K3 = 10.0


def _k1(x: Tensor) -> Tensor:
    return x


def _abs(x: Tensor) -> Tensor:
    return x.abs()


def _k2(x: Tensor) -> Tensor:
    return 0.5 * x.square()


def _k3(x: Tensor) -> Tensor:
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.exp(-x) + x - 1).clamp(-MAX_K3, MAX_K3)


_ESTIMATORS = {
    "kl": _k1,
    "k1": _k1,
    "abs": _abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, kind: str) -> Tensor:
    """Estimate of KL(π ‖ π_ref) at each sampled token.

    logprobs, ref_logprobs: [batch, response]; log π and log π_ref of the sampled tokens.
    kind: `kl`|`k1`, `abs`, `mse`|`k2`, `low_var_kl`|`k3`. With a `+` behind it the value is that
    kind's and the gradient is k2's.
    Returns [batch, response]; there is no mask here, the aggregation of the loss has it. An
    element that is not finite keeps its value and has gradient 0, so that under a mask it
    changes nothing.

    Bias of the *value* for y ~ π: k1 and k3 none; k2 and abs are other quantities. k3 is bounded
    (|x| ≤ 20, result ≤ 10), hence too small, with no gradient, below x = −2.61 and above x = 11.

    Bias of the *gradient* for y ~ π, against Σ_t E[∇ KL(π(·|prefix) ‖ π_ref(·|prefix))]:
        k2, and each kind with `+`  none:   E[x ∇log π]
        k1                          no signal: E[∇log π] = 0
        k3                          E[(1 − π_ref/π) ∇log π], which is ∇KL(π_ref ‖ π), the other
                                    direction; equal to first order near π = π_ref
        abs                         E[sign(x) ∇log π], the gradient of a total variation
    Prefixes are held fixed in all of them: the part of ∇KL of whole sequences that comes from
    tokens changing what follows is left out.
    """
    base_kind, straight_through = kind.removesuffix("+"), kind.endswith("+")
    if base_kind == "full":
        raise ValueError(
            "kind 'full' needs the whole distributions: call kl_of_logprobs(logprobs, ref_logprobs)"
        )
    if base_kind not in _ESTIMATORS:
        raise ValueError(f"kind {kind!r}: choose from {', '.join(_ESTIMATORS)}, each with '+' too")
    estimator = _ESTIMATORS[base_kind]

    log_ratio = logprobs - ref_logprobs.detach()  # [batch, response]
    finite = log_ratio.isfinite()
    x = log_ratio.masked_fill(~finite, 0)
    kl = estimator(x)
    if straight_through:
        surrogate = _k2(x)
        kl = kl.detach() + (surrogate - surrogate.detach())
    return torch.where(finite, kl, estimator(log_ratio.detach()))


def kl_of_logprobs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(π ‖ π_ref) summed over the vocabulary at each token (kind `full`).

        KL_t = Σ_a π(a | prefix) (log π(a | prefix) − log π_ref(a | prefix))

    logprobs, ref_logprobs: [tokens, vocab] → [tokens]. No bias in value or gradient given the prefix.
    A symbol that π never draws (π = 0) adds nothing, whatever the reference thinks of it. As in `kl_penalty`, a token
    whose KL is not finite (the reference never draws what π may, or is NaN) keeps that value and has gradient 0, so
    that under a mask it changes nothing.
    """
    probabilities = logprobs.exp()
    difference = torch.where(probabilities > 0, logprobs - ref_logprobs, 0)
    total = difference.detach().sum(-1)  # inf or NaN where one of them is
    finite = total.isfinite()
    kl = (probabilities * difference.masked_fill(~finite.unsqueeze(-1), 0)).sum(-1)
    return torch.where(finite, kl, total)


class FixedKLController:
    """A coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Changes nothing; the other controller's interface."""


class AdaptiveKLController:
    """Steers the KL towards a target (Ziegler et al. 2019, "Fine-tuning language models", §2.2).

        e = clip(KL / target − 1, −0.2, 0.2)
        β ← β (1 + e · n_steps / horizon)

    n_steps counts samples, as `horizon` does.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """A NaN says nothing about the distance and leaves the coefficient alone."""
        if math.isnan(current_kl):
            return
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon
