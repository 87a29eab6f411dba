"""KL to the reference: estimators, exact sum, controllers."""

import math

import numpy as np
import pytest
import torch

from learner.kl import AdaptiveKLController, FixedKLController, kl_of_logprobs, kl_penalty
from learner.logprobs import Beside, token_logprobs
from tests import reference

SYNONYMS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3"}
KINDS = {**SYNONYMS, "k3": "k3"}


def estimate(logprobs, ref_logprobs, kind):
    """→ KL and the gradient of its sum, as arrays"""
    logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(logprobs, torch.tensor(ref_logprobs, dtype=torch.float64), kind=kind)
    kl.sum().backward()
    return kl.detach().numpy(), logprobs.grad.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient(kind):
    # log-ratios from −3.5 to 12 cross the bound of k3 (10) on both sides
    ref = np.zeros((2, 9))
    logprobs = np.stack([np.linspace(-3.5, 3.1, 9), np.linspace(4.2, 12.3, 9)])
    kl, grad = estimate(logprobs, ref, kind)
    np.testing.assert_allclose(kl, reference.kl(logprobs, ref, KINDS[kind]), rtol=1e-12)
    expected = reference.gradient(lambda x: reference.kl(x, ref, KINDS[kind]).sum(), logprobs)
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    batch = reference.random_batch(0)
    kl, grad = estimate(batch.logprobs, batch.ref, kind + "+")
    np.testing.assert_array_equal(kl, estimate(batch.logprobs, batch.ref, kind)[0])
    np.testing.assert_allclose(grad, batch.logprobs - batch.ref, rtol=1e-12)


@pytest.mark.parametrize("log_ratio", [15.0, 90.0, -90.0])
@pytest.mark.parametrize("kind", [*KINDS, "k1+", "k3+"])
def test_large_log_ratios_stay_finite_in_float32(kind, log_ratio):
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    ref_logprobs = torch.tensor([[-1.0 + log_ratio, -2.0]])
    kl = kl_penalty(logprobs, ref_logprobs, kind=kind)
    kl.sum().backward()
    assert kl.isfinite().all() and logprobs.grad.isfinite().all()
    if kind in ("k3", "low_var_kl"):
        assert kl[0, 0] == 10 and logprobs.grad[0, 0] == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [*KINDS, "k1+", "k3+"])
def test_a_bad_element_has_no_gradient_and_keeps_to_itself(kind, poison):
    logprobs = torch.tensor([[-1.0, poison, -2.0]], requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0, -1.0]])
    kl = kl_penalty(logprobs, ref_logprobs, kind=kind)
    (kl * torch.tensor([[1.0, 0.0, 1.0]])).sum().backward()
    clean = estimate([[-1.0, -2.0]], [[-1.5, -1.0]], kind)
    np.testing.assert_allclose(kl[0, ::2].detach(), clean[0][0], rtol=1e-6)
    np.testing.assert_allclose(logprobs.grad[0, ::2], clean[1][0], rtol=1e-6)
    assert logprobs.grad[0, 1] == 0
    if math.isnan(poison):
        assert kl[0, 1].isnan()


def test_unknown_kinds_are_refused_by_name():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="kl_of_logprobs"):
        kl_penalty(one, one, kind="full")
    with pytest.raises(ValueError, match=r"'k4'.*low_var_kl"):
        kl_penalty(one, one, kind="k4")


def full_kl(logits, ref_logits, *, chunk_tokens=None, temperatures=None):
    """[tokens, vocab], twice → [tokens], the way it is computed: chunk by chunk, recomputed in the backward pass"""
    tokens, vocab = logits.shape
    temperatures = torch.ones(tokens) if temperatures is None else temperatures
    beside = Beside(ref_logits, torch.clone)
    targets = torch.zeros(tokens, dtype=torch.int64)
    return token_logprobs(
        logits, torch.clone, targets, temperatures, vocab_size=vocab, with_entropy=False, chunk_tokens=chunk_tokens,
        beside=beside,
    )[2]  # fmt: skip


@pytest.mark.parametrize("chunk_tokens", [1, 3, 256])
def test_full_kl_is_the_sum_over_the_vocabulary(chunk_tokens):
    rng = np.random.default_rng(0)
    logits, ref_logits = rng.standard_normal((2, 7, 5))
    temperatures = rng.uniform(0.5, 1.5, 7)

    def naive(z):
        scaled = (x[np.newaxis] / temperatures[:, np.newaxis] for x in (z, ref_logits))
        return reference.kl_full(*scaled, np.ones((1, 7)))

    trained, frozen = (torch.tensor(x, requires_grad=True) for x in (logits, ref_logits))
    kl = full_kl(trained, frozen, chunk_tokens=chunk_tokens, temperatures=torch.tensor(temperatures))
    np.testing.assert_allclose(kl.detach(), naive(logits)[0], rtol=1e-9, atol=1e-15)
    kl.sum().backward()
    np.testing.assert_allclose(trained.grad, reference.gradient(lambda z: naive(z).sum(), logits), rtol=1e-6, atol=1e-9)
    assert frozen.grad is None


def test_full_kl_ignores_symbols_that_cannot_be_drawn():
    logits = torch.tensor([[0.0, 1.0, -math.inf]] * 2, requires_grad=True)
    ref_logits = torch.tensor([[1.0, 0.0, -math.inf], [1.0, 0.0, 0.0]])
    kl = full_kl(logits, ref_logits)
    p = 1 / (1 + math.e)
    assert kl[0].item() == pytest.approx(1 - 2 * p, rel=1e-6)  # Σ p log(p/q) = (1−p) − p
    more = math.log(1 + math.e + 1) - math.log(1 + math.e)  # the reference has something for the third
    assert kl[1].item() == pytest.approx(1 - 2 * p + more, rel=1e-6)
    kl.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("poison", [-math.inf, math.nan])
@pytest.mark.parametrize("chunk_tokens", [1, 256])
def test_full_kl_that_is_not_finite_has_no_gradient_and_keeps_to_its_token(poison, chunk_tokens):
    """The reference never draws what the policy may, at the second token, which a mask takes out."""
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3, requires_grad=True)
    ref_logits = torch.tensor([[1.0, 0.0, 2.0]] * 3)
    ref_logits[1, 0] = poison
    kl = full_kl(logits, ref_logits, chunk_tokens=chunk_tokens)
    assert kl[1] == math.inf if poison == -math.inf else kl[1].isnan()
    live = torch.tensor([True, False, True])
    kl.masked_fill(~live, 0).sum().backward()
    masked = logits.grad.clone()
    assert masked.isfinite().all() and not masked[1].any()
    logits.grad = None
    full_kl(logits, torch.tensor([[1.0, 0.0, 2.0]] * 3), chunk_tokens=chunk_tokens)[live].sum().backward()
    torch.testing.assert_close(masked, logits.grad, rtol=1e-6, atol=0)
    assert masked[0].any()


def test_full_kl_ignores_what_the_policy_draws_with_a_probability_that_is_0_in_float32():
    logits = torch.tensor([[0.0, 1.0, -200.0]], requires_grad=True)
    kl = full_kl(logits, torch.tensor([[1.0, 0.0, -math.inf]]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(1 - 2 / (1 + math.e), rel=1e-6) and logits.grad.isfinite().all()


def test_full_kl_computes_in_float32_for_bfloat16_logits():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    kl = full_kl(logits, logits.flip(-1))
    expected = kl_of_logprobs(*(x.double().log_softmax(-1) for x in (logits, logits.flip(-1))))
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=0)


def test_fixed_controller_stays():
    controller = FixedKLController(0.02)
    controller.update(current_kl=5.0, n_steps=64)
    assert controller.value == 0.02


@pytest.mark.parametrize(
    ("current_kl", "factor"),
    [(0.3, 1.2), (0.11, 1.1), (0.1, 1.0), (0.05, 0.8), (math.inf, 1.2), (math.nan, 1.0)],
)
def test_adaptive_controller_steers_towards_the_target(current_kl, factor):
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=0.1, horizon=100)
    controller.update(current_kl=current_kl, n_steps=100)
    assert controller.value == pytest.approx(0.5 * factor)
