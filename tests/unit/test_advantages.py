"""Advantages against the papers' sums, and what masks must and must not do to them."""

import math

import numpy as np
import pytest
import torch

from learner.advantages import (
    gae,
    grpo,
    overlong_penalty,
    reinforce_plus_plus,
    remax,
    rloo,
    whiten,
)
from tests import reference

SEEDS = range(4)


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


def close(ours, theirs, rtol=1e-9):
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.9, 0.0)])
def test_gae_is_the_discounted_sum_of_residuals(seed, gamma, lam):
    b = reference.random_batch(seed)
    inputs = tensors(b.rewards, b.values, b.mask)
    advantages, returns = gae(*inputs, gamma=gamma, lam=lam, whiten=False)
    expected, expected_returns = reference.gae(b.rewards, b.values, b.mask, gamma, lam)
    close(advantages, expected)
    close(returns, expected_returns)
    whitened, same_returns = gae(*inputs, gamma=gamma, lam=lam)
    close(whitened, reference.whiten(expected, b.mask), rtol=1e-6)
    close(same_returns, expected_returns)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_the_return_to_go(seed, gamma):
    b = reference.random_batch(seed)
    inputs = tensors(b.rewards, b.mask)
    expected = reference.discounted_returns(b.rewards, b.mask, gamma)
    close(reinforce_plus_plus(*inputs, gamma=gamma, whiten=False)[0], expected)
    advantages, returns = reinforce_plus_plus(*inputs, gamma=gamma)
    close(advantages, reference.whiten(expected, b.mask), rtol=1e-6)
    close(returns, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_estimators(seed):
    b = reference.random_batch(seed)
    inputs = tensors(b.rewards, b.mask, b.groups)
    for norm_by_std in (True, False):
        expected = reference.grpo(b.rewards, b.mask, b.groups, norm_by_std)
        close(grpo(*inputs, norm_by_std=norm_by_std), expected)
    close(rloo(*inputs), reference.rloo(b.rewards, b.mask, b.groups))


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_is_the_return_to_go_less_the_baseline(seed):
    b = reference.random_batch(seed)
    baselines = b.values[:, 0]
    ours = remax(*tensors(b.rewards, baselines, b.mask))
    close(ours * torch.tensor(b.mask), reference.remax(b.rewards, baselines, b.mask))


def test_worked_examples():
    mask, groups = torch.ones(4, 1), torch.tensor([0, 0, 0, 1])
    scores = torch.tensor([[1.0], [0.0], [0.5], [0.7]])
    close(grpo(scores, mask, groups).flatten(), [1.0, -1.0, 0.0, 0.7], rtol=1e-5)
    close(grpo(scores, mask, groups, norm_by_std=False).flatten(), [0.5, -0.5, 0.0, 0.7], rtol=1e-6)
    close(rloo(scores, mask, groups).flatten(), [0.75, -0.75, 0.0, 0.7], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_scores_gives_no_advantage(dtype):
    scores = torch.full((7, 1), 0.1, dtype=dtype)
    advantages = grpo(scores, torch.ones(7, 1), torch.zeros(7, dtype=torch.long))
    assert advantages.abs().max() < 1e-6


def estimators(b, mask):
    """Every estimator on the arrays of a batch: name → tensor."""
    rewards, values, groups = tensors(b.rewards, b.values, b.groups)
    mask, baselines = tensors(mask, b.returns[:, 0])
    named = {
        "grpo": grpo(rewards, mask, groups),
        "dr_grpo": grpo(rewards, mask, groups, norm_by_std=False),
        "rloo": rloo(rewards, mask, groups),
        "remax": remax(rewards, baselines, mask) * mask,
        "whiten": whiten(values, mask),
    }
    named["gae"], named["gae returns"] = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    named["rf++"], named["rf++ returns"] = reinforce_plus_plus(rewards, mask, gamma=0.9)
    return named


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_under_the_mask_changes_nothing(poison):
    b = reference.random_batch(0)
    dead = b.mask == 0
    clean = estimators(b, b.mask)
    b.rewards[dead] = b.values[dead] = poison
    for name, advantages in estimators(b, b.mask).items():
        assert torch.equal(advantages * torch.tensor(b.mask), clean[name]), name
        assert (advantages[torch.tensor(dead)] == 0).all(), name


def test_boolean_masks_do_what_float_masks_do():
    b = reference.random_batch(1)
    expected = estimators(b, b.mask)
    for name, advantages in estimators(b, b.mask.astype(bool)).items():
        assert torch.equal(advantages, expected[name]), name


def test_nothing_has_a_gradient():
    b = reference.random_batch(0)
    rewards, values, mask = tensors(b.rewards, b.values, b.mask)
    values.requires_grad_()
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize("mask", [np.zeros((8, 7)), np.eye(8, 7) * (np.arange(7) == 3)])
def test_no_live_token_or_a_single_one_stays_finite(mask):
    for name, advantages in estimators(reference.random_batch(0), mask).items():
        assert advantages.isfinite().all(), name
        if mask.sum() == 0:
            assert (advantages == 0).all(), name


def test_a_nan_score_stays_in_its_group():
    scores = torch.tensor([[math.nan], [1.0], [2.0], [4.0]])
    groups = torch.tensor([0, 0, 1, 1])
    for estimator in (grpo, rloo):
        advantages = estimator(scores, torch.ones(4, 1), groups)
        assert advantages[0].isnan() and advantages[2:].isfinite().all()


# A row whose tokens were all rejected is no member of its group.


@pytest.mark.parametrize(
    "estimator",
    [grpo, rloo, lambda r, m, g: grpo(r, m, g, norm_by_std=False)],
    ids=["grpo", "rloo", "dr_grpo"],
)
def test_a_rejected_row_does_not_move_its_siblings(estimator):
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.2], [0.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    advantages = estimator(rewards, mask, torch.tensor([4, 4, 4]))
    alone = estimator(rewards[:2], mask[:2], torch.tensor([4, 4]))
    assert torch.equal(advantages[:2], alone)
    assert alone[0, 0] > 0.3 > 0 > alone[1, 0]
    assert (advantages[2] == 0).all()


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_a_rejected_token_does_not_move_the_group(estimator):
    """The caller puts a row's whole score on its last *live* token."""
    sampled, live = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    score_on_last = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.4]])
    score_on_last_live = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.4]])
    groups = torch.tensor([0, 0])
    before = estimator(score_on_last, sampled, groups)
    after = estimator(score_on_last_live, live, groups)
    assert torch.equal(after, before * live)
    assert before[0, 0] > 0


def test_recursion_over_sampled_tokens_then_whitening_over_live_ones():
    """A rejected token still links the tokens around it; only the statistics leave it out."""
    b = reference.random_batch(2)
    rewards, values, sampled = tensors(b.rewards, b.values, b.mask)
    live = sampled.clone()
    live[0, 6] = live[1, 4] = 0
    advantages, _ = gae(rewards, values, sampled, gamma=0.9, lam=0.8, whiten=False)
    ours = whiten(advantages, live)
    expected = reference.gae(b.rewards, b.values, b.mask, 0.9, 0.8)[0]
    close(ours, reference.whiten(expected, live.numpy()), rtol=1e-6)
    rejected_too_early = gae(rewards, values, live, gamma=0.9, lam=0.8)[0]
    assert (ours - rejected_too_early).abs().max() > 0.1


def test_group_names_and_row_order_do_not_matter():
    b = reference.random_batch(3)
    rewards, mask, groups = tensors(b.rewards, b.mask, b.groups)
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    for estimator in (grpo, rloo):
        expected = estimator(rewards, mask, groups)
        shuffled = estimator(rewards[order], mask[order], groups[order] * 1000 - 7)
        torch.testing.assert_close(shuffled, expected[order], rtol=1e-12, atol=1e-12)


def test_whitening_a_part_with_the_sums_of_the_whole():
    b = reference.random_batch(0)
    values, mask = tensors(b.values, b.mask)
    parts = [(values[:3], mask[:3]), (values[3:5], mask[3:5]), (values[5:], mask[5:])]
    count = sum(m.sum() for _, m in parts)
    mean = sum((v * m).sum() for v, m in parts) / count
    var = sum(((v - mean).square() * m).sum() for v, m in parts) / (count - 1)
    ours = torch.cat([whiten(v, m, mean=mean, var=var) for v, m in parts])
    torch.testing.assert_close(ours, whiten(values, mask), rtol=1e-8, atol=1e-8)
    live = ours[mask.bool()]
    assert float(live.mean()) == pytest.approx(0, abs=1e-8)
    assert float(live.var()) == pytest.approx(1, rel=1e-6)
    by_numbers = whiten(values, mask, mean=float(mean), var=float(var))
    torch.testing.assert_close(by_numbers, ours, rtol=1e-12, atol=1e-12)


def test_rows_in_a_padded_batch_are_what_they_are_alone():
    b = reference.random_batch(1)
    rewards, values, mask = tensors(b.rewards, b.values, b.mask)
    together, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8, whiten=False)
    for i in range(8):
        own = slice(0, int(mask[i].nonzero().max()) + 1 if mask[i].any() else 1)
        alone = [x[i : i + 1, own] for x in (rewards, values, mask)]
        advantages, own_returns = gae(*alone, gamma=0.9, lam=0.8, whiten=False)
        assert torch.equal(advantages[0], together[i, own])
        assert torch.equal(own_returns[0], returns[i, own])
        assert (together[i, own.stop :] == 0).all()


def test_overlong_penalty_grows_through_the_buffer():
    lengths = torch.tensor([10, 80, 85, 90, 100, 120])
    penalty = overlong_penalty(lengths, max_response_length=100, buffer_tokens=20, penalty_factor=2.0)
    close(penalty, [0.0, 0.0, -0.5, -1.0, -2.0, -2.0], rtol=1e-6)
