"""The papers' sums, as slow loops in NumPy: a second witness for the estimators in `learner/`.

Nothing here is vectorised or masked cleverly. A row is the list of its live tokens; a mean is a
sum over that list divided by its length; a recursion is the sum that it abbreviates. Where a
paper stops a gradient, the function takes that factor from `frozen`, a copy of the current
log-probabilities, so that finite differences in `logprobs` give the paper's gradient.
"""

from dataclasses import dataclass
from math import exp, inf, log, prod, sqrt

import numpy as np


def rows(x, mask):
    """Each row's values on its live tokens, as lists."""
    pairs = zip(x, mask, strict=True)
    return [[float(v) for v, m in zip(xs, ms, strict=True) if m] for xs, ms in pairs]


def flat(per_row):
    return [value for row in per_row for value in row]


def place(per_row, mask):
    """The inverse of `rows`: [batch, response] with 0 under the mask."""
    out = np.zeros(mask.shape)
    for i, values in enumerate(per_row):
        out[i, np.flatnonzero(mask[i])] = values
    return out


def mean(values):
    return sum(values) / len(values) if values else 0.0


def clip(x, low, high):
    return max(low, min(x, high))


# KL to the reference: Schulman 2020


def kl(logprobs, ref_logprobs, kind):
    estimate = {
        "k1": lambda x: x,
        "abs": abs,
        "k2": lambda x: x**2 / 2,
        "k3": lambda x: clip(exp(clip(-x, -20, 20)) - clip(-x, -20, 20) - 1, -10, 10),
    }[kind]
    out = np.zeros(logprobs.shape)
    for i, t in np.ndindex(*logprobs.shape):
        out[i, t] = estimate(logprobs[i, t] - ref_logprobs[i, t])
    return out


def kl_full(logits, ref_logits, mask):
    out = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        p = [exp(z) / sum(map(exp, logits[i, t])) for z in logits[i, t]]
        q = [exp(z) / sum(map(exp, ref_logits[i, t])) for z in ref_logits[i, t]]
        out[i, t] = sum(a * log(a / b) for a, b in zip(p, q, strict=True))
    return out


# Advantages


def gae(rewards, values, mask, gamma, lam):
    """A_t = Σ_l (γλ)^l δ_{t+l} (Schulman et al. 2016, eq. 16), over the policy's own tokens."""
    advantages = []
    for r, v in zip(rows(rewards, mask), rows(values, mask), strict=True):
        v_next = [*v[1:], 0.0]
        delta = [r[t] + gamma * v_next[t] - v[t] for t in range(len(r))]
        from_t = range(len(r))
        advantages.append([sum((gamma * lam) ** (u - t) * delta[u] for u in from_t[t:]) for t in from_t])
    advantages = place(advantages, mask)
    return advantages, (advantages + values) * mask


def discounted_returns(rewards, mask, gamma):
    returns = [
        [sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))] for r in rows(rewards, mask)
    ]
    return place(returns, mask)


def whiten(x, mask):
    values = flat(rows(x, mask))
    mu = mean(values)
    var = sum((v - mu) ** 2 for v in values) / max(len(values) - 1, 1)
    return place([[(v - mu) / sqrt(var + 1e-8) for v in row] for row in rows(x, mask)], mask)


def _scores_of_groups(rewards, mask, groups):
    """group → {row: score} of its rows that have a live token"""
    scores = {g: {} for g in groups}
    for i, (g, r) in enumerate(zip(groups, rows(rewards, mask), strict=True)):
        if r:
            scores[g][i] = sum(r)
    return scores


def _spread(row_advantages, mask):
    return place([[row_advantages.get(i, 0.0)] * int(m.sum()) for i, m in enumerate(mask)], mask)


def grpo(rewards, mask, groups, norm_by_std):
    advantages = {}
    for scores in _scores_of_groups(rewards, mask, groups).values():
        s = list(scores.values())
        mu, sigma = (mean(s), np.std(s, ddof=1)) if len(s) > 1 else (0.0, 1.0)
        for i in scores:
            advantages[i] = (scores[i] - mu) / (sigma + 1e-6 if norm_by_std else 1)
    return _spread(advantages, mask)


def rloo(rewards, mask, groups):
    advantages = {}
    for scores in _scores_of_groups(rewards, mask, groups).values():
        for i in scores:
            advantages[i] = scores[i] - mean([scores[j] for j in scores if j != i])
    return _spread(advantages, mask)


def remax(rewards, baselines, mask):
    return (discounted_returns(rewards, mask, 1.0) - baselines[:, None]) * mask


# Losses


def aggregate(losses, mask, mode, scale=None):
    """The four ways to make one number of the losses of the live tokens."""
    live = [row for row in rows(losses, mask) if row]
    if mode == "token-mean":
        return mean(flat(live))
    if mode == "seq-mean-token-sum":
        return mean([sum(row) for row in live])
    if mode == "seq-mean-token-mean":
        return mean([mean(row) for row in live])
    assert mode == "seq-mean-token-sum-norm"
    return mean([sum(row) / (scale or mask.shape[1]) for row in live])


def ppo(logprob, proximal, advantage, low, high, c):
    """Schulman et al. 2017, eq. 7, and for A < 0 the dual clip of Ye et al. 2020: the loss."""
    r = exp(clip(logprob - proximal, -20, 20))
    surrogate = min(r * advantage, clip(r, 1 - low, 1 + high) * advantage)
    return -max(surrogate, c * advantage) if advantage < 0 else -surrogate


def policy_loss(logprobs, frozen, proximal, advantages, mask, *, mode, low, high, c, agg, weights):
    """frozen: a copy of logprobs in the factors that have no gradient."""
    losses = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        a = advantages[i, t]
        if mode == "vanilla":
            losses[i, t] = ppo(logprobs[i, t], proximal[i, t], a, low, high, c)
        elif mode == "gspo":  # Zheng et al. 2025, the form with per-token advantages
            ratios = [exp(frozen[i, u] - proximal[i, u]) for u in np.flatnonzero(mask[i])]
            s = prod(ratios) ** (1 / len(ratios)) * exp(logprobs[i, t] - frozen[i, t])
            s = min(s, exp(10))
            losses[i, t] = -min(s * a, clip(s, 1 - low, 1 + high) * a)
        else:  # cispo, MiniMax-M1 2025
            r = exp(clip(frozen[i, t] - proximal[i, t], -20, 20))
            losses[i, t] = -clip(r, 1 - low, 1 + high) * a * logprobs[i, t]
    return aggregate(losses * weights, mask, agg)


def value_loss(vpreds, values, returns, mask, *, cliprange, agg):
    losses = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        near = clip(vpreds[i, t], values[i, t] - cliprange, values[i, t] + cliprange)
        losses[i, t] = max((vpreds[i, t] - returns[i, t]) ** 2, (near - returns[i, t]) ** 2) / 2
    return aggregate(losses, mask, agg)


# Correction


def importance_weights(proximal, behavior, mask, level, low, high):
    weights = []
    for p, b in zip(rows(proximal, mask), rows(behavior, mask), strict=True):
        rho = [exp(x) / exp(y) for x, y in zip(p, b, strict=True)]
        if level == "sequence":
            rho = [prod(rho)] * len(rho)
        elif level == "geometric" and rho:
            rho = [prod(rho) ** (1 / len(rho))] * len(rho)
        if low is None:
            weights.append([min(w, high) for w in rho])
        else:
            weights.append([w if low <= w <= high else 0.0 for w in rho])
    return place(weights, mask)


def rejection_mask(proximal, behavior, mask, mode, low, high):
    kept = []
    for p, b in zip(rows(proximal, mask), rows(behavior, mask), strict=True):
        rho = [exp(x) / exp(y) for x, y in zip(p, b, strict=True)]
        if mode == "icepop":
            kept.append([float(low <= w <= high) for w in rho])
            continue
        level, _, k = mode.rpartition("_")
        drift = [{"k1": -log(w), "k2": log(w) ** 2 / 2, "k3": w - 1 - log(w)}[k] for w in rho]
        over_row = {"seq_sum": sum, "seq_mean": mean, "seq_max": max}.get(level)
        if over_row and drift:
            drift = [over_row(drift)] * len(drift)
        lower, upper = (log(low), log(high)) if k == "k1" else (-inf, high)
        kept.append([float(lower <= d <= upper) for d in drift])
    return place(kept, mask)


def offpolicy_metrics(proximal, behavior, mask):
    pairs = zip(rows(proximal, mask), rows(behavior, mask), strict=True)
    pairs = [(p, b) for p, b in pairs if p]
    rho = [exp(x - y) for p, b in pairs for x, y in zip(p, b, strict=True)]
    training = [-mean(p) for p, _ in pairs]
    rollout = [-mean(b) for _, b in pairs]
    difference = [t - r for t, r in zip(training, rollout, strict=True)]
    return {
        "training_ppl": mean([exp(x) for x in training]),
        "training_log_ppl": mean(training),
        "kl": mean([-log(r) for r in rho]),
        "k3_kl": mean([r - 1 - log(r) for r in rho]),
        "rollout_ppl": mean([exp(x) for x in rollout]),
        "rollout_log_ppl": mean(rollout),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean([abs(d) for d in difference]),
        "log_ppl_diff_max": max(difference),
        "log_ppl_diff_min": min(difference),
        "ppl_ratio": mean([exp(d) for d in difference]),
        "chi2_token": mean([r**2 for r in rho]) - 1,
        "chi2_seq": mean([exp(2 * (sum(p) - sum(b))) for p, b in pairs]) - 1,
    }


# Gradients, and inputs to try all this on


def gradient(f, x, step=1e-6):
    """∂f/∂x by central differences."""
    out = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        out[index] = (f(up) - f(down)) / (2 * step)
    return out


@dataclass
class Batch:
    """Random rows of every awkward kind; log-ratios on both sides of every clip."""

    logprobs: np.ndarray
    proximal: np.ndarray
    behavior: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    values: np.ndarray
    vpreds: np.ndarray
    returns: np.ndarray
    weights: np.ndarray
    mask: np.ndarray
    groups: np.ndarray


def random_batch(seed, spread=0.5):
    """Rows: full, with a hole, with two, of length 1, empty, random. Groups: of three rows, of
    two with one row empty, of one, of two."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((8, 7))
    mask[0] = 1
    mask[1, [0, 1, 4, 5, 6]] = 1
    mask[2, [1, 2, 4]] = 1
    mask[3, 0] = 1
    # row 4 has no live token
    for i in (5, 6, 7):
        mask[i, : rng.integers(2, 7)] = 1
    proximal = -rng.exponential(1.5, mask.shape)
    near = lambda x, by: x + by * rng.standard_normal(mask.shape)  # noqa: E731
    return Batch(
        logprobs=near(proximal, spread),
        proximal=proximal,
        behavior=near(proximal, spread),
        ref=near(proximal, spread),
        advantages=near(0, 1.0),
        rewards=near(0, 1.0),
        values=near(0, 1.0),
        vpreds=near(0, 1.0),
        returns=near(0, 1.0),
        weights=rng.uniform(0, 2, mask.shape),
        mask=mask,
        groups=np.array([7, 7, 7, 2, 2, 5, 9, 9]),
    )
