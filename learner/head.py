"""The LM head as a value: what makes logits of hidden states, chunk by chunk without loss of precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class LinearHead:
    """hidden [tokens, hidden] → logits [tokens, vocab] = scale(W hidden + b)."""

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None = None  # [vocab]
    scale: Callable[[Tensor], Tensor] | None = None  # the model's own output scaling

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._scaled(linear(hidden, self.weight, self.bias))

    def in_chunks(self) -> Callable[[Tensor], Tensor]:
        """The same, for several calls in one graph: their gradients of W are summed in float32, in one buffer.

        Autograd itself would add them up in the dtype of W, and round after each chunk.
        """
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            return self
        total = _Total()
        weight = _Gathers.apply(self.weight, total)

        def call(hidden: Tensor) -> Tensor:
            logits = _Linear.apply(hidden, weight, total)
            return self._scaled(logits if self.bias is None else logits + self.bias)

        return call

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.scale is None else self.scale(logits)


class _Total:
    """The gradient of W [vocab, hidden] so far, at least float32."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """gradient: of the logits [tokens, vocab] that `hidden` [tokens, hidden] gave."""
        if self._sum is None:
            self._sum = (gradient.T @ hidden).to(torch.promote_types(hidden.dtype, torch.float32))
        elif self._sum.dtype == hidden.dtype:
            self._sum.addmm_(gradient.T, hidden)
        else:
            self._sum.add_(gradient.T @ hidden)

    def take(self, dtype: torch.dtype) -> Tensor | None:
        total, self._sum = self._sum, None
        return None if total is None else total.to(dtype)


class _Gathers(torch.autograd.Function):
    """W itself. Its backward runs when those of all its uses have, which leave their gradients in `total`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Total) -> Tensor:
        ctx.total, ctx.dtype = total, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, nothing: None) -> tuple[Tensor | None, None]:
        return ctx.total.take(ctx.dtype), None


class _Linear(torch.autograd.Function):
    """W hidden; the gradient of W goes to `total`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, total: _Total) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.total = total
        return linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.total.add(gradient, hidden)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
