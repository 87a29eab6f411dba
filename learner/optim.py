"""AdamW with verl's names, its schedule, and the one update that may be refused."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.config import Optim


def make_optimizer(module: nn.Module, config: Optim) -> torch.optim.AdamW:
    """AdamW over all parameters of `module` that are trained, its state made at once (all zeros)."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=True,
    )
    for p in parameters:  # a checkpoint made before the first update is then like any other
        optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def learning_rate(config: Optim, step: int, *, max_steps: int, peak: float | None = None) -> float:
    """The learning rate of training step `step` (the first is 1); all updates of a step share it.

    Linear warm-up over `lr_warmup_steps`, then constant, or cosine or linear from `lr` to
    `min_lr_ratio · lr` at `max_steps`. `peak` stands in for `lr` (a live limit).
    """
    peak = config.lr if peak is None else peak
    if step <= config.lr_warmup_steps:
        return peak * step / config.lr_warmup_steps
    span = max(1, max_steps - config.lr_warmup_steps)
    progress = min(1.0, (step - config.lr_warmup_steps) / span)
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.lr_scheduler_type]
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


def update(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *, loss: Tensor, lr: float, grad_clip: float
) -> tuple[Tensor, bool]:
    """Clip and step, unless loss or gradient is not finite; gradients are freed either way.

    loss: scalar, the sum over the micro-batches of all ranks.
    Returns (norm of the gradient before clipping, whether the weights were changed). The norm is
    global, hence all ranks decide alike. The host waits for the device here, once an update: what must
    not be applied cannot be decided later.
    """
    norm = nn.utils.clip_grad_norm_(parameters, grad_clip)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    finite = bool((norm.isfinite() & loss.isfinite()).item())
    if finite:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach(), finite
