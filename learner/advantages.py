"""Advantages: how much better a token (or a whole response) did than expected.

Rows are responses, columns response tokens, `[batch, response]`. Two masks matter in a step. The
*sampled* mask holds all tokens the policy drew; scores and the backward recursions of `gae` and
`reinforce_plus_plus` run over it. The *live* mask is what rejection and staleness left of it;
group statistics, whitening and losses use it. Each function takes one mask, named
`response_mask`, so the caller chooses: `gae(..., sampled_mask, whiten=False)`, then
`whiten(..., live_mask)`. For `grpo` and `rloo` pass the live mask, with each row's whole score on
its last live token.

What is under the mask, NaN and inf too, never reaches a result. Nothing here has a gradient.
"""

import torch
from torch import Tensor

EPS = 1e-8  # keeps an empty mask and a constant batch from dividing by zero
EPS_STD = 1e-6  # the same for the standard deviation of a group


@torch.no_grad()
def whiten(
    advantages: Tensor,
    response_mask: Tensor,
    *,
    mean: Tensor | float | None = None,
    var: Tensor | float | None = None,
) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the live tokens.

        A ← (A − mean) / √(var + 1e-8),   var = Σ m (A − mean)² / (Σ m − 1)

    advantages, response_mask: [batch, response] → [batch, response], 0 under the mask.
    mean, var: statistics of the whole batch where this is a part of it. Their sums, Σ m A and
    then Σ m (A − mean)², can be added up over the parts.
    Bias: the baseline and the scale contain the token itself, O(1/number of tokens).
    """
    live = response_mask.bool()
    num_tokens = live.sum()
    if mean is None:
        mean = advantages.masked_fill(~live, 0).sum() / (num_tokens + EPS)
    centered = (advantages - mean).masked_fill(~live, 0)
    if var is None:
        var = centered.square().sum() / (num_tokens - 1).clamp(min=1)
    return centered / (var + EPS) ** 0.5


_whiten = whiten  # the functions below have an argument of that name


@torch.no_grad()
def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16; recursion from the end).

        δ_t = r_t + γ V_{t+1} − V_t
        A_t = δ_t + γ λ A_{t+1}
        R_t = A_t + V_t

    t + 1 is the next token *of the policy*: observation tokens in between (mask 0) are passed
    over, with their values and rewards. After the last token V and A are 0.

    token_level_rewards, values, response_mask: [batch, response].
    Returns (advantages, returns), [batch, response], 0 under the mask; returns are not whitened.
    Bias: none for λ = 1 (whatever the values); for λ < 1 that of the values.
    """
    live = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~live, 0)
    values = values.masked_fill(~live, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # [batch]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_value = torch.where(live[:, t], values[:, t], next_value)
        next_advantage = torch.where(live[:, t], advantages[:, t], next_advantage)
    advantages = advantages.masked_fill(~live, 0)
    returns = advantages + values
    return (_whiten(advantages, live) if whiten else advantages), returns


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025): discounted return to go, whitened over the batch; no critic.

        R_t = r_t + γ R_{t+1},   A = whiten(R)

    t + 1 as in `gae`. token_level_rewards, response_mask: [batch, response].
    Returns (advantages, returns), [batch, response], 0 under the mask.
    Bias: that of the discount, and of `whiten`.
    """
    live = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~live, 0)
    returns = torch.zeros_like(rewards)
    next_return = torch.zeros_like(rewards[:, 0])  # [batch]
    for t in reversed(range(rewards.shape[1])):
        returns[:, t] = rewards[:, t] + gamma * next_return
        next_return = torch.where(live[:, t], returns[:, t], next_return)
    returns = returns.masked_fill(~live, 0)
    return (_whiten(returns, live) if whiten else returns), returns


@torch.no_grad()
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    norm_by_std: bool = True,
) -> Tensor:
    """Score of a response against its group (GRPO: Shao et al. 2024, §4.1.2).

        A_i = (s_i − mean(s)) / (std(s) + 1e-6),   s_i = Σ_t r_{i,t}

    `norm_by_std=False` leaves out the division (Dr. GRPO: Liu et al. 2025).

    token_level_rewards, response_mask: [batch, response]; group_ids: [batch], any integers.
    Returns [batch, response]: A_i on each live token, 0 under the mask. Mean and (unbiased) std
    are those of the group's rows that have a live token; a row without one takes no part. A group
    with one such row has mean 0 and std 1: the score stays the advantage.
    Bias: the mean contains s_i, which shrinks the gradient by 1 − 1/n; dividing by the std
    weighs easy and hard prompts up against middling ones.
    """
    scores, live_rows, group = _scores_and_groups(token_level_rewards, response_mask, group_ids)
    size, mean = _group_size_and_mean(scores, live_rows, group)
    alone = size == 1
    centered = (scores - torch.where(alone, 0, mean)).masked_fill(~live_rows, 0)
    if norm_by_std:
        squares = torch.zeros_like(scores).index_add(0, group, centered.square())[group]
        std = torch.where(alone, 1, (squares / (size - 1).clamp(min=1)).sqrt())
        centered = centered / (std + EPS_STD)
    return _on_live_tokens(centered, token_level_rewards, response_mask)


@torch.no_grad()
def rloo(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Score of a response against the mean of the others (RLOO: Ahmadian et al. 2024).

        A_i = s_i − 1/(n−1) Σ_{j≠i} s_j = n/(n−1) (s_i − mean(s)),   s_i = Σ_t r_{i,t}

    Shapes, masks and rows without a live token as in `grpo`; n counts the rows that have one.
    A group with one such row keeps its score. Bias: none.
    """
    scores, live_rows, group = _scores_and_groups(token_level_rewards, response_mask, group_ids)
    size, mean = _group_size_and_mean(scores, live_rows, group)
    against_others = (scores - mean) * size / (size - 1).clamp(min=1)
    advantages = torch.where(size == 1, scores, against_others)
    return _on_live_tokens(advantages, token_level_rewards, response_mask)


@torch.no_grad()
def remax(token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor) -> Tensor:
    """Return to go against the score of a greedy response (ReMax: Li et al. 2024).

        A_t = Σ_{u≥t} r_u − b

    token_level_rewards, response_mask: [batch, response]; reward_baselines: [batch], b of the
    row's prompt. Returns [batch, response]; on an observation token, which nothing trains, the
    return alone. Bias: none, b does not depend on the response.
    """
    live = response_mask.bool()
    rewards = token_level_rewards.masked_fill(~live, 0)
    returns = torch.zeros_like(rewards)
    to_go = torch.zeros_like(rewards[:, 0])  # [batch]
    for t in reversed(range(rewards.shape[1])):  # not `cumsum`, which is not deterministic on a GPU
        returns[:, t] = to_go = to_go + rewards[:, t]
    return returns - reward_baselines.unsqueeze(-1).expand_as(rewards).masked_fill(~live, 0)


@torch.no_grad()
def overlong_penalty(
    num_tokens: Tensor, *, max_response_length: int, buffer_tokens: int, penalty_factor: float
) -> Tensor:
    """Added to the score of a response that nears the limit of length (DAPO: Yu et al. 2025).

        p = −factor · clip((|y| − (L_max − L_buffer)) / L_buffer, 0, 1)

    num_tokens: [batch], raw lengths |y|, before any rejection → [batch], ≤ 0.
    Bias: wanted; it changes the objective.
    """
    into_buffer = num_tokens - (max_response_length - buffer_tokens)
    return -penalty_factor * (into_buffer / buffer_tokens).clamp(0, 1)


def _scores_and_groups(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """→ scores [batch] (0 where no token lives), live rows [batch], group number [batch]"""
    live = response_mask.bool()
    # float64: in a group of equal scores the rounding of a mean must not look like a spread.
    scores = token_level_rewards.masked_fill(~live, 0).sum(-1, dtype=torch.float64)
    group_ids = torch.as_tensor(group_ids, device=scores.device)
    return scores, live.any(-1), group_ids.unique(return_inverse=True)[1]


def _group_size_and_mean(
    scores: Tensor, live_rows: Tensor, group: Tensor
) -> tuple[Tensor, Tensor]:
    """→ live rows of the row's group [batch], their mean score [batch]"""
    zeros = torch.zeros_like(scores)  # at most as many groups as rows
    size = zeros.index_add(0, group, live_rows.to(scores.dtype))
    mean = zeros.index_add(0, group, scores) / size.clamp(min=1)
    return size[group], mean[group]


def _on_live_tokens(row_advantages: Tensor, like: Tensor, response_mask: Tensor) -> Tensor:
    """[batch] → [batch, response]"""
    advantages = row_advantages.to(like.dtype).unsqueeze(-1).expand_as(like)
    return advantages.masked_fill(~response_mask.bool(), 0)
