"""Losses against the papers' sums; masks, denominators and micro-batches."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from learner.kl import kl_penalty
from learner.losses import aggregate, policy_loss, value_loss
from tests import reference

MODES = ["vanilla", "gspo", "cispo"]
AGG_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


def policy(b, mode, agg, rows=slice(None), weights=True, mask=None, **step):
    """→ loss, gradient [batch, response] and metrics on some rows of a batch"""
    mask = b.mask if mask is None else mask
    arrays = (b.logprobs, b.proximal, b.advantages, mask, b.weights)
    logprobs, *others, is_weights = (torch.tensor(array[rows]) for array in arrays)
    logprobs.requires_grad_()
    loss, metrics = policy_loss(
        logprobs,
        *others,
        mode=mode,
        **CLIP,
        loss_agg_mode=agg,
        is_weights=is_weights if weights else None,
        **step,
    )
    loss.backward()
    return float(loss.detach()), logprobs.grad, metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_policy_loss_is_the_papers(mode, agg, seed):
    b = reference.random_batch(seed)

    def loss_of(logprobs):
        return reference.policy_loss(
            logprobs, b.logprobs, b.proximal, b.advantages, b.mask, mode=mode, low=0.2, high=0.28,
            c=1.5, agg=agg, weights=b.weights,
        )  # fmt: skip

    loss, grad, _ = policy(b, mode, agg)
    assert loss == pytest.approx(loss_of(b.logprobs), rel=1e-7)
    expected = reference.gradient(loss_of, b.logprobs)
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-9)


def test_the_random_batches_span_every_clip():
    clipped = np.zeros((2, 3), dtype=int)
    for seed in range(3):
        b = reference.random_batch(seed)
        live = b.mask > 0
        ratio, negative = np.exp(b.logprobs - b.proximal)[live], (b.advantages < 0)[live]
        region = np.digitize(ratio, [0.8, 1.28])
        np.add.at(clipped, (negative.astype(int), region), 1)
        assert (negative & (ratio > 1.5)).any()  # dual clip
        assert (b.mask.sum(-1) == 0).any() and (b.mask.sum(-1) == 1).any()
    assert (clipped >= 3).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("cliprange", [0.2, 2.0])
def test_value_loss_is_the_clipped_squared_error(seed, agg, cliprange):
    b = reference.random_batch(seed)

    def loss_of(vpreds):
        return reference.value_loss(vpreds, b.values, b.returns, b.mask, cliprange=cliprange, agg=agg)

    vpreds, *others = tensors(b.vpreds, b.values, b.returns, b.mask)
    vpreds.requires_grad_()
    loss, metrics = value_loss(vpreds, *others, cliprange_value=cliprange, loss_agg_mode=agg)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(loss_of(b.vpreds), rel=1e-7)
    expected = reference.gradient(loss_of, b.vpreds)
    np.testing.assert_allclose(vpreds.grad, expected, rtol=1e-6, atol=1e-9)
    moved, error = b.vpreds - b.values, b.vpreds - b.returns
    clipped_error = b.values + moved.clip(-cliprange, cliprange) - b.returns
    worse = (abs(moved) > cliprange) & (abs(clipped_error) > abs(error))
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(worse[b.mask > 0].mean())
    assert float(metrics["critic/vpred_mean"]) == pytest.approx(b.vpreds[b.mask > 0].mean())


def test_value_loss_without_a_clip_is_half_the_squared_error():
    vpreds, values, returns = torch.tensor([[5.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]])
    mask = torch.ones(1, 1)
    assert value_loss(vpreds, values, returns, mask, cliprange_value=None)[0] == 8.0
    assert value_loss(vpreds, values, returns, mask, cliprange_value=0.5)[0] == 8.0
    far = value_loss(vpreds, torch.tensor([[5.5]]), returns, mask, cliprange_value=0.1)[0]
    assert float(far) == pytest.approx(0.5 * 4.4**2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # ε_low 0.2, ε_high 0.28, c 1.5; slope is ∂ℓ/∂log r
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.4, 2.0, -2.56, 0.0),  # clipped above
        (0.5, 2.0, -1.0, -1.0),  # a good token that became rare still pulls
        (0.5, -2.0, 1.6, 0.0),  # clipped below
        (1.4, -2.0, 2.8, 2.8),
        (1.7, -2.0, 3.0, 0.0),  # dual clip
    ],
)
def test_each_piece_of_the_ppo_surrogate(ratio, advantage, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    ours, metrics = policy_loss(
        logprobs, zero, advantage * one, one, mode="vanilla", **CLIP, loss_agg_mode="token-mean"
    )
    ours.backward()
    assert float(ours.detach()) == pytest.approx(loss)
    assert float(logprobs.grad) == pytest.approx(slope, abs=1e-12)
    assert float(metrics["actor/pg_clipfrac"]) == (slope == 0 and ratio < 1.7)
    assert float(metrics["actor/pg_clipfrac_lower"]) == (ratio == 1.7)
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize(("log_ratio", "bound"), [(9.0, math.exp(9)), (12.0, math.exp(10))])
def test_the_sequence_ratio_is_bounded(log_ratio, bound):
    logprobs, mask = torch.full((1, 2), -1.0, dtype=torch.float64), torch.ones(1, 2)
    loss, _ = policy_loss(logprobs, logprobs - log_ratio, -mask, mask, mode="gspo", **CLIP, loss_agg_mode="token-mean")
    assert float(loss) == pytest.approx(bound)


# Denominators


@pytest.mark.parametrize(
    ("agg", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 4) / 4),
        ("seq-mean-token-sum", (1 + 9) / 2),
        ("seq-mean-token-mean", (1 + 3) / 2),
        ("seq-mean-token-sum-norm", (1 + 9) / 2 / 3),
    ],
)
def test_aggregation_counts_live_tokens_and_live_rows(agg, expected):
    losses = torch.tensor([[1.0, 50.0, 60.0], [2.0, 3.0, 4.0], [70.0, 80.0, 90.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert float(aggregate(losses, mask, loss_agg_mode=agg)) == pytest.approx(expected)
    without_the_dead_row = aggregate(losses[:2], mask[:2], loss_agg_mode=agg)
    assert float(without_the_dead_row) == pytest.approx(expected)


def test_scale_takes_the_place_of_the_padded_width():
    losses, mask = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
    agg = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    assert aggregate(losses, mask, **agg) == 1.5
    assert aggregate(losses, mask, **agg, scale=6) == 0.5


def test_counts_may_be_numbers_or_tensors():
    losses, mask = torch.ones(2, 2), torch.ones(2, 2)
    for count in (8, 8.0, torch.tensor(8), torch.tensor(8.0)):
        assert aggregate(losses, mask, loss_agg_mode="token-mean", num_tokens=count) == 0.5
        share = aggregate(losses, mask, loss_agg_mode="seq-mean-token-sum", num_sequences=count)
        assert share == 0.5


@pytest.mark.parametrize(("mode", "agg"), product(MODES, AGG_MODES))
def test_an_empty_batch_has_loss_and_gradient_zero(mode, agg):
    b = reference.random_batch(0)
    loss, grad, metrics = policy(b, mode, agg, mask=np.zeros_like(b.mask))
    assert loss == 0 and (grad == 0).all()
    assert all(value == 0 for value in metrics.values())
    loss, grad, _ = policy(b, mode, agg, rows=slice(0, 0), num_tokens=25, num_sequences=7)
    assert loss == 0 and grad.shape == (0, 7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("mode", "agg"), product(MODES, AGG_MODES))
def test_micro_batches_add_up_to_the_batch(mode, agg, seed):
    b = reference.random_batch(seed)
    num_tokens, num_sequences = int(b.mask.sum()), int((b.mask.sum(-1) > 0).sum())
    step = {"num_tokens": num_tokens, "num_sequences": num_sequences, "scale": 7}
    loss, grad, metrics = policy(b, mode, agg)
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, 9, 3))  # some parts may be empty
    parts = np.split(rng.permutation(8), cuts)
    losses, total = [], {name: 0.0 for name in metrics}
    for rows in parts:
        part_loss, part_grad, part_metrics = policy(b, mode, agg, rows=rows, **step)
        losses.append(part_loss)
        np.testing.assert_allclose(part_grad, grad[rows], rtol=1e-12, atol=1e-15)
        for name, value in part_metrics.items():
            total[name] += float(value)
    assert sum(losses) == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert total == pytest.approx({name: float(v) for name, v in metrics.items()}, rel=1e-6)


@pytest.mark.parametrize("agg", AGG_MODES)
def test_micro_batches_of_the_other_losses_add_up_too(agg):
    b = reference.random_batch(1)
    step = {"num_tokens": b.mask.sum(), "num_sequences": 7, "scale": 7, "loss_agg_mode": agg}

    def gradients(rows, **step):
        arrays = (b.vpreds, b.logprobs, b.values, b.returns, b.mask)
        vpreds, logprobs, *others = tensors(*(x[rows] for x in arrays))
        vpreds.requires_grad_(), logprobs.requires_grad_()
        loss, _ = value_loss(vpreds, *others, cliprange_value=0.2, **step)
        kl = kl_penalty(logprobs, torch.tensor(b.ref[rows]), kind="low_var_kl")
        (loss + aggregate(kl, others[-1], **step)).backward()
        return vpreds.grad, logprobs.grad

    whole = gradients(slice(None), loss_agg_mode=agg)
    for rows in ([0], [4], [7, 2, 5], [1, 3, 6]):
        for ours, expected in zip(gradients(rows, **step), whole, strict=True):
            np.testing.assert_allclose(ours, expected[rows], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("agg", AGG_MODES)
def test_a_masked_row_does_not_dilute_the_loss(agg):
    b = reference.random_batch(0)
    for rows in ([0], [1], [3]):  # row 4 has no live token
        alone, grad, _ = policy(b, "vanilla", agg, rows=rows)
        both, both_grad, _ = policy(b, "vanilla", agg, rows=[*rows, 4])
        assert both == pytest.approx(alone, rel=1e-12)
        np.testing.assert_allclose(both_grad[:1], grad, rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_nothing(mode):
    """Rows of 3 and 5 tokens, padded to 7 and each on its own."""
    b = reference.random_batch(0)
    b.mask = np.arange(7) < np.array([3, 5])[:, None]
    for name in ("logprobs", "proximal", "advantages", "weights"):
        setattr(b, name, getattr(b, name)[:2])
    _, padded, _ = policy(b, mode, "seq-mean-token-mean", num_sequences=2)
    for i, length in enumerate([3, 5]):
        own = (slice(i, i + 1), slice(0, length))
        _, alone, _ = policy(b, mode, "seq-mean-token-mean", rows=own, num_sequences=2)
        np.testing.assert_allclose(padded[own], alone, rtol=1e-12)
        assert (padded[i, length:] == 0).all()


# What is not finite


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("mode", "agg"), product(MODES, AGG_MODES))
def test_what_is_under_the_mask_changes_nothing(mode, agg, poison):
    b = reference.random_batch(0)
    loss, grad, metrics = policy(b, mode, agg)
    dead = b.mask == 0
    for name in ("logprobs", "proximal", "advantages", "weights"):
        getattr(b, name)[dead] = poison
    poisoned_loss, poisoned_grad, poisoned_metrics = policy(b, mode, agg)
    assert poisoned_loss == loss and torch.equal(poisoned_grad, grad)
    assert poisoned_metrics == metrics
    assert (grad[torch.tensor(dead)] == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_under_the_mask_changes_no_value_or_kl_loss(poison):
    b = reference.random_batch(0)

    def losses():
        arrays = (b.vpreds, b.logprobs, b.values, b.returns, b.ref, b.mask)
        vpreds, logprobs, values, returns, ref, mask = tensors(*arrays)
        vpreds.requires_grad_(), logprobs.requires_grad_()
        loss, metrics = value_loss(vpreds, values, returns, mask, cliprange_value=0.2)
        kl = kl_penalty(logprobs, ref, kind="k3+")
        kl_loss = aggregate(kl, mask, loss_agg_mode="token-mean")
        (loss + kl_loss).backward()
        return [loss, kl_loss, vpreds.grad, logprobs.grad, *metrics.values()]

    clean = losses()
    for name in ("vpreds", "logprobs", "values", "returns", "ref"):
        getattr(b, name)[b.mask == 0] = poison
    assert all(map(torch.equal, losses(), clean))


@pytest.mark.parametrize("name", ["logprobs", "proximal", "advantages", "weights"])
@pytest.mark.parametrize("mode", MODES)
def test_a_nan_on_a_live_token_reaches_the_loss(mode, name):
    b = reference.random_batch(0)
    getattr(b, name)[0, 2] = math.nan
    assert math.isnan(policy(b, mode, "token-mean")[0])


def test_a_nan_return_or_kl_reaches_the_loss():
    nan, one = torch.full((1, 1), math.nan), torch.ones(1, 1)
    assert value_loss(one, one, nan, one, cliprange_value=0.2)[0].isnan()
    for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+"):
        kl = kl_penalty(one, nan, kind=kind)
        assert aggregate(kl, one, loss_agg_mode="token-mean").isnan(), kind


@pytest.mark.parametrize("log_ratio", [-90.0, 90.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_huge_log_ratios_give_finite_gradients_in_float32(mode, advantage, log_ratio):
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    proximal = torch.tensor([[-1.0 - log_ratio, -2.1, -2.9]])
    loss, _ = policy_loss(
        logprobs,
        proximal,
        torch.full((1, 3), advantage),
        torch.ones(1, 3),
        mode=mode,
        **CLIP,
        loss_agg_mode="token-mean",
    )
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


# Where gradients may go, and what is refused


def test_only_the_trained_input_has_a_gradient():
    b = reference.random_batch(0)
    arrays = (b.logprobs, b.proximal, b.advantages, b.weights)
    logprobs, proximal, advantages, weights = inputs = tensors(*arrays)
    for x in inputs:
        x.requires_grad_()
    for mode in MODES:
        loss, metrics = policy_loss(
            logprobs, proximal, advantages, torch.tensor(b.mask), mode=mode, **CLIP,
            loss_agg_mode="token-mean", is_weights=weights,
        )  # fmt: skip
        loss.backward()
        assert not any(value.requires_grad for value in metrics.values())
    assert logprobs.grad.abs().sum() > 0
    assert proximal.grad is advantages.grad is weights.grad is None


def test_boolean_masks_do_what_float_masks_do():
    b = reference.random_batch(0)
    for mode, agg in product(MODES, AGG_MODES):
        loss, grad, _ = policy(b, mode, agg)
        bool_loss, bool_grad, _ = policy(b, mode, agg, mask=b.mask.astype(bool))
        assert bool_loss == loss and torch.equal(bool_grad, grad)


def test_weights_of_one_are_no_weights():
    b = reference.random_batch(0)
    b.weights[:] = 1
    for mode in MODES:
        loss, grad, _ = policy(b, mode, "token-mean")
        plain_loss, plain_grad, _ = policy(b, mode, "token-mean", weights=False)
        assert loss == plain_loss and torch.equal(grad, plain_grad)


def test_unknown_names_are_refused():
    b = reference.random_batch(0)
    with pytest.raises(ValueError, match=r"'sapo'.*vanilla"):
        policy(b, "sapo", "token-mean")
    with pytest.raises(ValueError, match="'mean'"):
        policy(b, "vanilla", "mean")
