"""Log-probs and entropy: chunked = plain, packed = one sequence a row, temperature, the model's own scaling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from common.wire import Sample
from learner.batch import make_batch
from learner.head import LinearHead
from learner.logprobs import token_logprobs
from learner.model import Actor, check_head, may_share_prompts
from learner.packing import Packing, micro_batches
from tests.learner_parts import make_sample
from tests.models import logprobs_of, tiny_model

VOCAB = 40
ALONE = Packing(None, rows_per_forward=1)
PADDED = Packing(60, packed=False)


def _samples(seed: int, n: int = 9, *, group_size: int = 1, **changes: object) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for i in range(n):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 12))).astype(np.int32)
        response = rng.integers(0, VOCAB, int(rng.integers(1, 9))).astype(np.int32)
        if i % group_size:
            prompt = samples[-1].prompt_ids
        group, length = i // group_size, len(response)
        samples.append(
            make_sample(rng, group, i, response_tokens=length, prompt_ids=prompt, response_ids=response, **changes)
        )
    return samples


def _logprobs(actor: Actor, samples: list[Sample], packing: Packing) -> torch.Tensor:
    """[batch, response]"""
    batch = make_batch(samples)
    out = torch.zeros_like(batch.behavior_logprobs)
    for micro in micro_batches(batch, np.arange(len(samples)), packing):
        out = out.index_add(0, micro.rows, micro.scatter(actor(micro)[0]))
    return out


@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunked_equals_plain_in_value_and_gradient(with_entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator)
    targets = torch.randint(VOCAB, (23,), generator=generator)
    temperatures = 0.5 + torch.rand(23, generator=generator)
    results = []
    for chunk in (None, 1, 7, 23):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy, _ = token_logprobs(
            h, LinearHead(w), targets, temperatures, vocab_size=VOCAB, with_entropy=with_entropy,
            chunk_tokens=chunk,
        )  # fmt: skip
        total = (logprobs * torch.arange(23)).sum() + (entropy.sum() if entropy is not None else 0)
        total.backward()
        results.append((logprobs, entropy, h.grad, w.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_bfloat16_loses_nothing_by_chunks() -> None:
    """The head's gradient is about as exact over 40 and 75 chunks as in one piece; rounded after each it would be 3
    times as far off."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(4096, 64, generator=generator), torch.randn(512, 64, generator=generator) * 0.1
    targets = torch.randint(512, (4096,), generator=generator)
    advantages = torch.randn(4096, generator=generator)

    def gradients(dtype: torch.dtype, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        h, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        logprobs, *_ = token_logprobs(
            h, LinearHead(w), targets, torch.ones(4096), vocab_size=512, with_entropy=False, chunk_tokens=chunk
        )
        (logprobs * advantages).sum().backward()
        return h.grad.double(), w.grad.double()

    exact = gradients(torch.float64, 4096)
    whole = gradients(torch.bfloat16, 4096)
    for chunk in (102, 55):
        chunked = gradients(torch.bfloat16, chunk)
        assert torch.equal(chunked[0], whole[0])
        off, off_in_one = ((g[1] - exact[1]).norm() / exact[1].norm() for g in (chunked, whole))
        assert off <= 1.3 * off_in_one


def test_a_second_backward_pass_begins_anew() -> None:
    weight = torch.randn(VOCAB, 16).requires_grad_()
    logprobs, *_ = token_logprobs(
        torch.randn(9, 16), LinearHead(weight, bias=torch.zeros(VOCAB, requires_grad=True)), torch.arange(9),
        torch.ones(9), vocab_size=VOCAB, with_entropy=False, chunk_tokens=4,
    )  # fmt: skip
    (first,) = torch.autograd.grad(logprobs.sum(), weight, retain_graph=True)
    (second,) = torch.autograd.grad(logprobs.sum(), weight)
    assert first.any() and torch.equal(first, second)


def test_entropy_is_that_of_the_distribution_sampled_from() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    p = (logits / 2).softmax(-1)
    _, entropy, _ = token_logprobs(
        logits, torch.clone, torch.tensor([0]), torch.tensor([2.0]), vocab_size=3, with_entropy=True
    )
    assert torch.allclose(entropy, -(p * p.log()).sum(-1))


def test_a_symbol_that_is_never_drawn_adds_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    _, entropy, _ = token_logprobs(
        logits, torch.clone, torch.tensor([0]), torch.ones(1), vocab_size=3, with_entropy=True
    )
    assert torch.allclose(entropy, torch.tensor([2.0]).log())


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    "packing", [Packing(24), Packing(60), Packing(4096), PADDED], ids=["24", "60", "4096", "padded"]
)
def test_packed_and_padded_rows_equal_one_sequence_a_row(packing: Packing, group_size: int) -> None:
    """In log-probs and gradients; groups of 4 share their prompts where rows are packed."""
    actor = Actor(tiny_model(1))
    samples = _samples(2, 12, group_size=group_size)
    packed = _logprobs(actor, samples, dataclasses.replace(packing, hidden_size=actor.hidden_size))
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(3))
    (packed * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in actor.named_parameters()}
    actor.zero_grad()
    alone = _logprobs(actor, samples, ALONE)
    (alone * weights).sum().backward()
    assert (packed - alone).abs().max() < 1e-5
    for name, p in actor.named_parameters():
        assert (gradients[name] - p.grad).abs().max() <= 1e-5 * p.grad.abs().max(), name


@pytest.mark.parametrize("fault", ["mask of ones", "cache", "positions that run on"])
def test_the_comparison_would_see_sequences_that_see_one_another(fault: str) -> None:
    model = tiny_model(1)
    batch = make_batch(_samples(2))
    packing = Packing(40, hidden_size=10_000)
    micro = next(m for m in micro_batches(batch, np.arange(9), packing) if len(m.rows) > len(m.input_ids))
    right = Actor(model)(micro)[0]
    given = {"position_ids": micro.position_ids, "attention_mask": None, "use_cache": fault == "cache"}
    if fault == "mask of ones":
        given["attention_mask"] = torch.ones_like(micro.input_ids)
    elif fault == "positions that run on":
        given["position_ids"] = torch.arange(micro.input_ids.shape[1]).expand_as(micro.input_ids)
    hidden = model.model(input_ids=micro.input_ids, **given).last_hidden_state.flatten(0, 1)[micro.wanted]
    wrong = model.lm_head(hidden).log_softmax(-1).gather(-1, micro.targets[:, None])[:, 0]
    assert (right - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_plain_model_at_the_samples_temperature(temperature: float) -> None:
    model = tiny_model(4)
    samples = _samples(5, sampling={"temperature": temperature})
    ours = _logprobs(Actor(model), samples, Packing(64))
    for row, s in zip(ours, samples, strict=True):
        theirs = torch.tensor(logprobs_of(model, s.prompt_ids.tolist(), s.response_ids.tolist(), temperature))
        assert (row[: len(theirs)] - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("packing", [Packing(64), PADDED], ids=["packed", "padded"])
def test_prompts_of_different_lengths_shift_nothing(packing: Packing) -> None:
    """Prompts of 3 and 5 tokens in one forward: each row as it is on its own."""
    actor, rng = Actor(tiny_model(6)), np.random.default_rng(7)
    samples = [
        make_sample(
            rng, i, 0, prompt_ids=rng.integers(0, VOCAB, n).astype(np.int32), response_tokens=4,
            response_ids=rng.integers(0, VOCAB, 4).astype(np.int32),
        )
        for i, n in enumerate((3, 5))
    ]  # fmt: skip
    together = _logprobs(actor, samples, packing)
    for row, s in zip(together, samples, strict=True):
        alone = torch.tensor(logprobs_of(actor.lm, s.prompt_ids.tolist(), s.response_ids.tolist()))
        assert (row - alone).abs().max() < 1e-5


def test_prompts_are_shared_only_where_each_layer_obeys_the_mask() -> None:
    assert may_share_prompts(tiny_model())
    assert not may_share_prompts(tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=1))
    eager = tiny_model()
    eager.config._attn_implementation = "eager"
    assert not may_share_prompts(eager)


def test_soft_caps_are_the_models_own() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=3.0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(40)  # so that the cap acts
    actor = Actor(model)
    check_head(actor)
    ids = torch.arange(VOCAB).unsqueeze(0)
    assert model(ids).logits.abs().max() > 2.5
