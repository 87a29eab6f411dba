"""The schedule, clipping, and the update that is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.config import Optim
from learner.optim import learning_rate, make_optimizer, update


def test_warm_up_begins_above_zero_and_ends_at_the_peak() -> None:
    config = Optim(lr=1.0, lr_warmup_steps=4)
    assert [learning_rate(config, s, max_steps=100) for s in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1, 1, 1]


@pytest.mark.parametrize(("kind", "half_way"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)])
def test_decay_reaches_its_floor_at_the_last_step(kind: str, half_way: float) -> None:
    config = Optim(lr=1.0, lr_warmup_steps=10, lr_scheduler_type=kind, min_lr_ratio=0.1)
    assert learning_rate(config, 60, max_steps=110) == pytest.approx(half_way)
    assert learning_rate(config, 110, max_steps=110) == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert learning_rate(config, 500, max_steps=110) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_a_live_limit_stands_in_for_the_peak() -> None:
    assert learning_rate(Optim(lr=1.0, lr_warmup_steps=2), 1, max_steps=10, peak=0.5) == 0.25


def _linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    module = nn.Linear(3, 1, bias=False)
    nn.init.ones_(module.weight)
    return module, make_optimizer(module, Optim(lr=0.1, weight_decay=0.0))


def test_the_gradient_is_clipped_and_its_norm_before_that_returned() -> None:
    module, optimizer = _linear()
    module.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    norm, applied = update(optimizer, list(module.parameters()), loss=torch.tensor(1.0), lr=0.1, grad_clip=1.0)
    assert applied
    assert norm.item() == pytest.approx(5.0)
    assert optimizer.state[module.weight]["exp_avg"].tolist() == [pytest.approx([0.06, 0, 0.08])]
    assert module.weight.grad is None


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_changes_nothing(where: str, value: float) -> None:
    module, optimizer = _linear()
    module.weight.grad = torch.tensor([[1.0, value if where == "gradient" else 1.0, 1.0]])
    loss = torch.tensor(value if where == "loss" else 1.0)
    _, applied = update(optimizer, list(module.parameters()), loss=loss, lr=0.1, grad_clip=1.0)
    assert not applied
    assert module.weight.tolist() == [[1, 1, 1]]
    assert optimizer.state[module.weight]["step"] == 0
    assert module.weight.grad is None


def test_the_first_update_has_the_whole_step_size() -> None:
    """The state is made beforehand with step 0, so the bias correction is that of a first step."""
    module, optimizer = _linear()
    module.weight.grad = torch.full((1, 3), 0.01)
    update(optimizer, list(module.parameters()), loss=torch.tensor(0.0), lr=0.1, grad_clip=1.0)
    assert module.weight.tolist() == [pytest.approx([0.9, 0.9, 0.9], abs=1e-5)]
