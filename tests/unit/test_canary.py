"""The proof of a load, without an engine."""

from __future__ import annotations

import pytest
import torch

from common.canary import Canary, canary_ids
from common.errors import DisprovedError, LeewayError
from learner.canary import CanaryForward
from tests import models


def test_its_log_probs_are_those_of_the_tensors_given() -> None:
    forward = CanaryForward(models.tiny_model(0), dtype="float32", max_tokens=1000)
    assert len(forward.ids) == 64 and max(forward.ids) < models.VOCAB_SIZE
    for seed in (1, 2):
        model = models.tiny_model(seed)
        canary = forward(model.named_parameters())
        wanted = models.logprobs_of(model, list(forward.ids[:1]), list(forward.ids[1:]))
        assert canary.check(wanted) < 1e-5
    with pytest.raises(DisprovedError, match=r"by \d.* \(max over 64 tokens; at most 0.0001 in float32\)"):
        forward(models.tiny_model(1).named_parameters()).check(wanted)


def test_it_computes_in_the_dtype_that_is_served() -> None:
    model = models.tiny_model(1, scale=1.0)
    exact = CanaryForward(model, dtype="float32", max_tokens=63)(model.named_parameters())
    half = CanaryForward(model, dtype="bfloat16", max_tokens=63)(
        (name, p.detach().bfloat16()) for name, p in model.named_parameters()
    )
    assert 0 < half.check(exact.logprobs) < 0.05
    with pytest.raises(DisprovedError):
        exact.check(half.logprobs)


def test_limits_nan_and_lengths() -> None:
    canary = Canary((3, 4, 5), (-1.0, -2.0), "float32")
    assert canary.check([-1.0, -2.00005]) == pytest.approx(5e-5)
    for bad in ([-1.0, -2.0002], [-1.0, float("nan")], [-1.0], [float("inf"), -2.0]):
        with pytest.raises(DisprovedError):
            canary.check(bad)
    mean = Canary((3, 4, 5), (-1.0, -2.0), "bfloat16")
    assert mean.check([-1.09, -2.0]) == pytest.approx(0.045)
    with pytest.raises(DisprovedError, match="mean"):
        mean.check([-1.11, -2.0])
    improbable = Canary((3, 4, 5), (-12.0, -18.0), "bfloat16")  # a hundredth of 15
    assert improbable.check([-12.28, -18.0]) == pytest.approx(0.14)
    with pytest.raises(DisprovedError, match=r"0\.16 \(mean over 3 tokens; at most 0\.15"):
        improbable.check([-12.32, -18.0])


def test_it_survives_the_wire_and_what_is_none_is_refused() -> None:
    canary = Canary(canary_ids(100, 8), tuple(torch.randn(7).tolist()), "bfloat16")
    assert Canary.decode(canary.encode()) == canary
    broken = Canary((1, 2), (0.0, 0.0, 0.0), "float32")
    for bad in (b"", b"\x01", broken.encode(), Canary((1, 2), (0.0,), "int8").encode()):
        with pytest.raises(LeewayError):
            Canary.decode(bad)
