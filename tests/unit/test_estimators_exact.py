"""Estimators against exact gradients, on policies small enough to enumerate.

A policy draws 3 tokens out of 4 symbols; its parameters are the logits after each of the 21
prefixes. Expectations are sums over the 64 responses (over pairs of them for group estimators),
so "equal" below means to 1e-9. Where an estimator is biased the test prints by how much
(`pytest -s`): the norm of the error over the norm of the exact gradient.
"""

import math
from functools import cache

import pytest
import torch

from learner.advantages import gae, grpo, reinforce_plus_plus, remax, rloo
from learner.correction import importance_weights
from learner.kl import kl_of_logprobs, kl_penalty
from learner.losses import policy_loss

SYMBOLS, LENGTH = 4, 3
RESPONSES = torch.cartesian_prod(*[torch.arange(SYMBOLS)] * LENGTH)  # [64, 3]
MASK = torch.ones(RESPONSES.shape)
POWERS = SYMBOLS ** torch.arange(LENGTH)


def prefix_numbers():
    """[64, 3]: which of the 1 + 4 + 16 prefixes each token follows"""
    numbers = torch.zeros_like(RESPONSES)
    offset = 0
    for t in range(LENGTH):
        digits = RESPONSES[:, :t] * POWERS[:t].flip(0)
        numbers[:, t] = offset + digits.sum(-1)
        offset += SYMBOLS**t
    return numbers


PREFIX = prefix_numbers()


@cache
def policy(seed):
    generator = torch.Generator().manual_seed(seed)
    return 0.8 * torch.randn(21, SYMBOLS, dtype=torch.float64, generator=generator)


CURRENT, BEHAVIOR = policy(0), policy(1)
REF = 0.5 * (policy(0) + policy(2))  # near enough for the bound of k3 (10) to play no part
REWARD = policy(3).flatten()[:64]  # of each response


def logprobs_of(logits):
    """[21, 4] → [64, 3]"""
    return logits.log_softmax(-1)[PREFIX].gather(-1, RESPONSES.unsqueeze(-1)).squeeze(-1)


def probability(logits):
    """[64]"""
    return logprobs_of(logits).sum(-1).exp()


def gradient(f, logits=CURRENT):
    logits = logits.clone().requires_grad_()
    f(logits).backward()
    return logits.grad


def distance(estimate, exact):
    return float((estimate - exact).norm() / exact.norm())


def equal(estimate, exact):
    return distance(estimate, exact) < 1e-9


def expected_reward(logits):
    return (probability(logits) * REWARD).sum()


EXACT = gradient(expected_reward)


def expected_gradient(sampler, weights, advantages, mode="vanilla"):
    """−E_{y~sampler}[∇ loss(y)] of the policy loss at ratio 1.

    sampler: probability of each row; weights: importance weights or None.
    """
    weights = torch.ones(RESPONSES.shape) if weights is None else weights

    def loss(logits):
        logprobs = logprobs_of(logits)
        return policy_loss(
            logprobs,
            logprobs.detach(),
            advantages.expand_as(logprobs),
            MASK,
            mode=mode,
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            clip_ratio_c=3.0,
            loss_agg_mode="seq-mean-token-sum",
            is_weights=weights * sampler.unsqueeze(-1),
            num_sequences=1,
        )[0]

    return -gradient(loss)


def weights(level, threshold=math.inf):
    return importance_weights(logprobs_of(CURRENT), logprobs_of(BEHAVIOR), MASK, level=level, threshold=threshold)


def test_the_enumeration_is_one():
    assert float(probability(CURRENT).sum()) == pytest.approx(1, abs=1e-12)
    assert PREFIX[:, 1].unique().tolist() == [1, 2, 3, 4]
    assert len(PREFIX[:, 2].unique()) == 16 and PREFIX.max() == 20
    assert EXACT.norm() > 0.1


# Policy gradients from another policy's samples

SCORES = REWARD.unsqueeze(-1)  # [64, 1], the same at each token


@pytest.mark.parametrize("mode", ["vanilla", "cispo", "gspo"], ids=["ppo", "reinforce", "gspo"])
def test_on_policy_the_gradient_is_exact(mode):
    assert equal(expected_gradient(probability(CURRENT), None, SCORES, mode), EXACT)


@pytest.mark.parametrize("mode", ["vanilla", "cispo"], ids=["ppo", "reinforce"])
def test_untruncated_sequence_weights_are_exact(mode):
    ours = expected_gradient(probability(BEHAVIOR), weights("sequence"), SCORES, mode)
    assert equal(ours, EXACT)


@pytest.mark.parametrize("mode", ["vanilla", "cispo"], ids=["ppo", "reinforce"])
def test_token_weights_leave_prefixes_and_continuations_to_the_sampler(mode):
    """Σ_t E[∇ Σ_a π(a | prefix) R]: only token t is π's, the others are μ's."""

    def only_one_token_is_ours(logits):
        ours, behavior = logprobs_of(logits), logprobs_of(BEHAVIOR)
        others = behavior.sum(-1, keepdim=True) - behavior
        return ((ours + others).exp() * SCORES).sum()

    ours = expected_gradient(probability(BEHAVIOR), weights("token"), SCORES, mode)
    assert equal(ours, gradient(only_one_token_is_ours))
    bias = distance(ours, EXACT)
    uncorrected = distance(expected_gradient(probability(BEHAVIOR), None, SCORES, mode), EXACT)
    print(f"\ntoken weights: {bias:.3f} from the exact gradient; no weights: {uncorrected:.3f}")
    assert 0.05 < bias < uncorrected


def test_truncation_is_biased_and_the_bias_vanishes_with_the_bound():
    bounds = [1.0, 1.5, 2.0, 4.0, 8.0, 1000.0]
    for level in ("sequence", "token", "geometric"):
        bias = [
            distance(expected_gradient(probability(BEHAVIOR), weights(level, bound), SCORES), EXACT) for bound in bounds
        ]
        print(f"\n{level} weights ≤ {bounds}:", " ".join(f"{b:.3f}" for b in bias))
        if level == "sequence":
            assert bias == sorted(bias, reverse=True) and bias[0] > 0.3
            assert bias[-1] < 1e-9
        else:
            assert min(bias) > 0.05


# Advantages


def test_a_critic_that_knows_nothing_does_no_harm_at_lambda_one():
    rewards = torch.zeros(RESPONSES.shape, dtype=torch.float64)
    rewards[:, -1] = REWARD
    values = policy(4)[:, 0][PREFIX]  # of the prefix, so it cannot depend on the token itself
    bias = {}
    for lam in (1.0, 0.9, 0.5):
        advantages, _ = gae(rewards, values, MASK, gamma=1.0, lam=lam, whiten=False)
        bias[lam] = distance(expected_gradient(probability(CURRENT), None, advantages), EXACT)
    print("\ngae with arbitrary values:", {lam: f"{b:.3f}" for lam, b in bias.items()})
    assert bias[1.0] < 1e-9 < bias[0.9] < bias[0.5]


def test_exact_values_make_every_lambda_exact():
    """V(prefix) = E[R | prefix] under the policy."""
    rewards = torch.zeros(RESPONSES.shape, dtype=torch.float64)
    rewards[:, -1] = REWARD
    mass = torch.zeros(21, dtype=torch.float64)
    worth = torch.zeros(21, dtype=torch.float64)
    for t in range(LENGTH):
        mass.index_add_(0, PREFIX[:, t], probability(CURRENT))
        worth.index_add_(0, PREFIX[:, t], probability(CURRENT) * REWARD)
    values = (worth / mass)[PREFIX]
    for lam in (0.0, 0.5, 1.0):
        advantages, _ = gae(rewards, values, MASK, gamma=1.0, lam=lam, whiten=False)
        assert equal(expected_gradient(probability(CURRENT), None, advantages), EXACT)


def test_returns_to_go_and_a_constant_baseline_are_exact():
    rewards = torch.zeros(RESPONSES.shape, dtype=torch.float64)
    rewards[:, -1] = REWARD
    returns, _ = reinforce_plus_plus(rewards, MASK, gamma=1.0, whiten=False)
    assert equal(expected_gradient(probability(CURRENT), None, returns), EXACT)
    advantages = remax(rewards, torch.full((64,), 0.7), MASK)
    assert equal(expected_gradient(probability(CURRENT), None, advantages), EXACT)


def expected_group_gradient(estimator):
    """Over all groups of two independent responses: row 2k is one, row 2k + 1 the other."""
    first, second = torch.cartesian_prod(torch.arange(64), torch.arange(64)).T
    rows = torch.stack([first, second], -1).flatten()  # [8192]
    group_ids = torch.arange(64 * 64).repeat_interleave(2)
    rewards = torch.zeros(len(rows), LENGTH, dtype=torch.float64)
    rewards[:, -1] = REWARD[rows]
    advantages = estimator(rewards, torch.ones(rewards.shape), group_ids)[:, 0]
    chance = probability(CURRENT)
    of_group = (chance[first] * chance[second]).repeat_interleave(2)
    mean_advantage = torch.zeros(64, dtype=torch.float64)
    mean_advantage.index_add_(0, rows, of_group * advantages / 2)  # the mean over the group
    return expected_gradient(torch.ones(64), None, mean_advantage.unsqueeze(-1))


def test_leave_one_out_is_exact():
    assert equal(expected_group_gradient(rloo), EXACT)


def test_the_mean_of_the_group_shrinks_the_gradient_and_the_std_turns_it():
    without_std = expected_group_gradient(lambda *args: grpo(*args, norm_by_std=False))
    assert equal(without_std, EXACT / 2)  # 1 − 1/n, n = 2
    with_std = expected_group_gradient(grpo)
    cosine = float(torch.cosine_similarity(with_std.flatten(), EXACT.flatten(), dim=0))
    print(f"\ngrpo: cosine with the exact gradient {cosine:.4f}")
    assert 0.5 < cosine < 0.9999


# KL to the reference, as a loss


def kl_gradient(kind):
    """E_{y~π}[Σ_t ∇ kl_t]"""

    def loss(logits):
        kl = kl_penalty(logprobs_of(logits), logprobs_of(REF), kind=kind)
        return (probability(CURRENT).unsqueeze(-1) * kl).sum()

    return gradient(loss)


def divergence_gradient(per_symbol):
    """Σ_t E_prefix[∇ Σ_a f(π(a | prefix), π_ref(a | prefix))], prefixes drawn and held fixed."""
    chance = torch.zeros(21, dtype=torch.float64)
    for t in range(LENGTH):
        chance.index_add_(0, PREFIX[:, t], probability(CURRENT))

    def divergence(logits):
        return (chance * per_symbol(logits.softmax(-1), REF.softmax(-1)).sum(-1)).sum()

    return gradient(divergence)


KL_GRADIENT = divergence_gradient(lambda p, q: p * (p / q).log())


def full_sequence_kl(logits):
    log_ratio = logprobs_of(logits).sum(-1) - logprobs_of(REF).sum(-1)
    return (probability(logits) * log_ratio).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_in_value_k1_and_k3_are_the_kl(kind):
    kl = kl_penalty(logprobs_of(CURRENT), logprobs_of(REF), kind=kind)
    mean = (probability(CURRENT).unsqueeze(-1) * kl).sum()
    assert float(mean) == pytest.approx(float(full_sequence_kl(CURRENT)), rel=1e-9)


@pytest.mark.parametrize("kind", ["k1+", "k3+", "k2", "low_var_kl+", "abs+"])
def test_in_gradient_plus_is_the_kl_with_prefixes_held_fixed(kind):
    assert equal(kl_gradient(kind), KL_GRADIENT)
    bias = distance(kl_gradient(kind), gradient(full_sequence_kl))
    print(f"\n{kind}: {bias:.3f} from the gradient of the KL of whole responses")
    assert bias > 0.05


def test_kl_in_the_reward_has_the_gradient_of_the_kl_of_whole_responses():
    kl = kl_penalty(logprobs_of(CURRENT), logprobs_of(REF), kind="kl")
    returns, _ = reinforce_plus_plus(-kl, MASK, gamma=1.0, whiten=False)
    ours = expected_gradient(probability(CURRENT), None, returns)
    assert equal(ours, -gradient(full_sequence_kl))


def test_the_sum_over_the_vocabulary_has_the_same_gradient():
    def loss(logits):
        kl = kl_of_logprobs(logits[PREFIX].log_softmax(-1), REF[PREFIX].log_softmax(-1)) * MASK
        return (probability(CURRENT).unsqueeze(-1) * kl).sum()

    assert equal(gradient(loss), KL_GRADIENT)


def test_plain_k3_descends_the_other_kl():
    assert equal(kl_gradient("k3"), divergence_gradient(lambda p, q: q * (q / p).log()))
    bias = distance(kl_gradient("k3"), KL_GRADIENT)
    print(f"\nplain k3: {bias:.3f} from the gradient of its own value")
    assert bias > 0.1


def test_plain_k1_has_no_signal_and_abs_is_a_total_variation():
    assert kl_gradient("k1").norm() < 1e-12
    assert equal(kl_gradient("abs"), divergence_gradient(lambda p, q: (p - q).abs()))
    bias = distance(kl_gradient("abs"), KL_GRADIENT)
    print(f"\nplain abs: {bias:.3f} from the gradient of the KL")
    assert bias > 0.1
