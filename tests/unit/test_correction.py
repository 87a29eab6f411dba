"""Importance weights, rejection, the interpolated proximal policy, diagnostics, thresholds."""

import math

import numpy as np
import pytest
import torch

from common.thresholds import REJECTION_MODES, parse_rejection, parse_threshold
from learner.correction import (
    importance_weights,
    loglinear_proximal,
    offpolicy_metrics,
    rejection_mask,
)
from learner.losses import policy_loss
from tests import reference

SEEDS = range(4)
LEVELS = ["token", "sequence", "geometric"]
BOUNDS = {  # thresholds that keep some and reject some
    "token_k1": "0.7_1.4",
    "token_k2": "0.1",
    "token_k3": 0.1,
    "seq_sum_k1": "0.4_2.0",
    "seq_sum_k2": 0.7,
    "seq_sum_k3": "0.7",
    "seq_mean_k1": "0.9_1.2",
    "seq_mean_k2": 0.12,
    "seq_mean_k3": 0.12,
    "seq_max_k2": 0.4,
    "seq_max_k3": 0.4,
    "icepop": "0.7_1.4",
}


def inputs(b, mask=None):
    return [torch.tensor(x) for x in (b.proximal, b.behavior, b.mask if mask is None else mask)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threshold", [1.5, "1.1", "0.6_1.5", math.inf])
def test_importance_weights(level, threshold):
    low, high = parse_threshold(threshold)
    changed = 0
    for seed in SEEDS:
        b = reference.random_batch(seed, spread=0.8)
        ours = importance_weights(*inputs(b), level=level, threshold=threshold)
        expected = reference.importance_weights(b.proximal, b.behavior, b.mask, level, low, high)
        np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-15)
        whole = reference.importance_weights(b.proximal, b.behavior, b.mask, level, None, math.inf)
        changed += (expected != whole).sum() / b.mask.sum() / len(SEEDS)
    assert changed == 0 if high == math.inf else 0.05 < changed < 0.95


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rejection_masks(mode):
    kept = 0
    for seed in SEEDS:
        b = reference.random_batch(seed)
        ours = rejection_mask(*inputs(b), mode=mode, threshold=BOUNDS[mode])
        ((_, low, high),) = parse_rejection(mode, BOUNDS[mode])
        expected = reference.rejection_mask(b.proximal, b.behavior, b.mask, mode, low, high)
        np.testing.assert_array_equal(ours, expected)
        kept += expected.sum() / b.mask.sum() / len(SEEDS)
        if mode.startswith("seq"):
            assert all(row.sum() in (0, m.sum()) for row, m in zip(expected, b.mask, strict=True))
    assert 0.1 < kept < 0.9


def test_k1_bounds_the_inverse_of_the_ratio_that_icepop_bounds():
    b = reference.random_batch(0)
    token_k1 = rejection_mask(*inputs(b), mode="token_k1", threshold="0.5_1.25")
    icepop = rejection_mask(*inputs(b), mode="icepop", threshold="0.8_2.0")
    assert torch.equal(token_k1, icepop)
    other = rejection_mask(*inputs(b), mode="icepop", threshold="0.5_1.25")
    assert not torch.equal(token_k1, other)


def test_several_modes_must_all_hold():
    b = reference.random_batch(1)
    both = rejection_mask(*inputs(b), mode="token_k1,seq_mean_k3", threshold="0.7_1.4,0.12")
    first = rejection_mask(*inputs(b), mode="token_k1", threshold="0.7_1.4")
    second = rejection_mask(*inputs(b), mode="seq_mean_k3", threshold=0.12)
    assert torch.equal(both, first * second)
    assert not torch.equal(both, first) and not torch.equal(both, second)


def test_a_mask_keeps_its_type():
    b = reference.random_batch(0)
    for mask in (b.mask.astype(bool), b.mask.astype(np.float32)):
        kept = rejection_mask(*inputs(b, mask), mode="token_k2", threshold=0.1)
        assert kept.dtype == torch.tensor(mask).dtype
        expected = rejection_mask(*inputs(b), mode="token_k2", threshold=0.1)
        assert torch.equal(kept.double(), expected)
        weights = importance_weights(*inputs(b, mask), level="sequence", threshold=2.0)
        assert torch.equal(weights, importance_weights(*inputs(b), level="sequence", threshold=2.0))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_under_the_mask_changes_nothing(poison):
    b = reference.random_batch(0)

    def everything():
        for level in LEVELS:
            yield importance_weights(*inputs(b), level=level, threshold=2.0)
        for mode, bounds in BOUNDS.items():
            yield rejection_mask(*inputs(b), mode=mode, threshold=bounds)
        yield from offpolicy_metrics(*inputs(b)).values()

    clean = list(everything())
    b.proximal[b.mask == 0] = poison
    b.behavior[b.mask == 0] = poison
    assert all(map(torch.equal, everything(), clean))


def test_a_nan_on_a_live_token_is_not_rejected_but_reaches_the_loss():
    b = reference.random_batch(0)
    b.proximal[1, 4] = math.nan
    proximal, behavior, mask = inputs(b)
    for mode, bounds in BOUNDS.items():
        assert rejection_mask(proximal, behavior, mask, mode=mode, threshold=bounds)[1, 4] == 1
    for level in LEVELS:
        for threshold in (2.0, "0.1_9"):
            weights = importance_weights(proximal, behavior, mask, level=level, threshold=threshold)
            assert weights[1, 4].isnan() and weights[0].isfinite().all()


@pytest.mark.parametrize("log_ratio", [90.0, -90.0])
def test_huge_log_ratios_stay_finite_in_float32(log_ratio):
    proximal, behavior = torch.tensor([[log_ratio, 0.0]]), torch.zeros(1, 2)
    mask = torch.ones(1, 2)
    for level in LEVELS:
        weights = importance_weights(proximal, behavior, mask, level=level, threshold=math.inf)
        assert weights.isfinite().all()
    for mode, bounds in BOUNDS.items():
        kept = rejection_mask(proximal, behavior, mask, mode=mode, threshold=bounds)
        assert kept[0, 0] == 0, mode
    metrics = offpolicy_metrics(proximal, behavior, mask)
    assert all(value.isfinite() for value in metrics.values())


def test_no_live_token_gives_zeros():
    b = reference.random_batch(0)
    for mask in (np.zeros_like(b.mask), np.zeros((0, 7))):
        if len(mask) == 0:
            b.proximal, b.behavior = mask, mask
        for level in LEVELS:
            assert importance_weights(*inputs(b, mask), level=level, threshold=2.0).sum() == 0
        for mode, bounds in BOUNDS.items():
            assert rejection_mask(*inputs(b, mask), mode=mode, threshold=bounds).sum() == 0
        assert all(value == 0 for value in offpolicy_metrics(*inputs(b, mask)).values())


@pytest.mark.parametrize("seed", SEEDS)
def test_offpolicy_metrics(seed):
    b = reference.random_batch(seed, spread=0.2)
    ours = {name: float(value) for name, value in offpolicy_metrics(*inputs(b)).items()}
    assert ours == pytest.approx(reference.offpolicy_metrics(b.proximal, b.behavior, b.mask), rel=1e-6)


def test_equal_policies_are_at_no_distance():
    b = reference.random_batch(0)
    b.behavior = b.proximal
    metrics = offpolicy_metrics(*inputs(b))
    for name in ("kl", "k3_kl", "log_ppl_abs_diff", "chi2_token", "chi2_seq"):
        assert metrics[name] == 0
    assert metrics["ppl_ratio"] == 1 and metrics["training_ppl"] == metrics["rollout_ppl"]


# The interpolated proximal policy


def test_loglinear_lies_between_sampler_and_current_policy():
    logprobs, behavior = torch.full((1, 4), -1.0), torch.full((1, 4), -3.0)
    versions = torch.tensor([[10, 9, 8, 6]])  # lag 0, 1, 2, 4: weight of μ 0, 1, 1/2, 1/4
    proximal = loglinear_proximal(logprobs, behavior, versions, current_version=10)
    assert proximal.tolist() == [[-1.0, -3.0, -2.0, -1.5]]


def test_loglinear_has_no_gradient_and_none_passes_through_the_ratio_of_a_fresh_token():
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    proximal = loglinear_proximal(logprobs, torch.tensor([[-2.0]]), torch.tensor([[3]]), current_version=3)
    assert not proximal.requires_grad and proximal.dtype == torch.float64
    loss, _ = policy_loss(
        logprobs, proximal, torch.ones(1, 1), torch.ones(1, 1), mode="vanilla",
        clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0, loss_agg_mode="token-mean",
    )  # fmt: skip
    loss.backward()
    assert loss == -1 and logprobs.grad == -1  # r = 1


def test_loglinear_keeps_a_bad_element_to_itself():
    logprobs, behavior = torch.full((1, 3), -1.0), torch.tensor([[-3.0, math.nan, -3.0]])
    proximal = loglinear_proximal(logprobs, behavior, torch.tensor([[1, -1, 2]]), current_version=3)
    assert proximal[0, [0, 2]].tolist() == [-2.0, -3.0]


# Thresholds


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        (2.0, (None, 2.0)),
        (3, (None, 3.0)),
        ("2.0", (None, 2.0)),
        (" 1e-3 ", (None, 1e-3)),
        ("0.5_2.0", (0.5, 2.0)),
        ("0.5_2", (0.5, 2.0)),
        ("1_1", (1.0, 1.0)),
        (math.inf, (None, math.inf)),
    ],
)
def test_thresholds_are_numbers_or_pairs(text, bounds):
    assert parse_threshold(text) == bounds


@pytest.mark.parametrize(
    "text", ["", "_", "_2", "0.5_", "a_b", "1_2_3", "two", "0.5-2", True, None, "nan", 0, -1, "0_2",
             "2_0.5", "nan_1"],
)  # fmt: skip
def test_other_thresholds_are_refused_by_name(text):
    with pytest.raises(ValueError, match="threshold"):
        parse_threshold(text)


def test_rejection_criteria():
    assert parse_rejection("token_k1", 2) == [("token_k1", 0.5, 2.0)]
    assert parse_rejection("seq_mean_k3", "0.05") == [("seq_mean_k3", 0.0, 0.05)]
    assert parse_rejection(" token_k2 , icepop", "0.1, 0.5_4") == [
        ("token_k2", 0.0, 0.1),
        ("icepop", 0.5, 4.0),
    ]
    assert parse_rejection("token_k2,token_k3", 0.1) == [
        ("token_k2", 0.0, 0.1),
        ("token_k3", 0.0, 0.1),
    ]


@pytest.mark.parametrize(
    ("mode", "threshold", "named"),
    [
        ("token_k4", 1, "token_k4"),
        ("", 1, "no rejection mode"),
        ("token_k2", "0.5_2", "only an upper bound"),
        ("token_k1", "0.5", "single bound"),
        ("token_k1,token_k2,token_k3", "1,2", "3 rejection modes but 2"),
    ],
)
def test_unfit_rejection_criteria_are_refused_by_name(mode, threshold, named):
    with pytest.raises(ValueError, match=named):
        parse_rejection(mode, threshold)


def test_unknown_levels_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'row'.*geometric"):
        importance_weights(*inputs(reference.random_batch(0)), level="row", threshold=2.0)
