"""A worker that loads something else than what was sent, after all digests were right; for tests of the canary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from generators import worker

Tensors = dict[str, torch.Tensor]


def swapped_names(t: Tensors) -> None:
    a, b = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    t[a], t[b] = t[b], t[a]


def flipped_bit(t: Tensors) -> None:
    name = "model.norm.weight"
    t[name] = t[name].clone()
    t[name].view(torch.int32)[5] ^= -(1 << 31)  # the sign of one element


def perturbed(t: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    t[name] = t[name] * 1.1


def other_dtype(t: Tensors) -> None:
    for name in t:
        t[name] = t[name].bfloat16().float()


def missing_layer(t: Tensors) -> None:
    for name in [n for n in t if ".layers.1." in n]:
        del t[name]


def stale_head(t: Tensors) -> None:
    """See ``_refresh`` below."""


FAULTS: dict[str, Callable[[Tensors], None]] = {
    f.__name__: f for f in (swapped_names, flipped_bit, perturbed, other_dtype, missing_layer, stale_head)
}
_fault: str | None = None
_refresh_tied_head = worker._refresh_tied_head


class _Faulty:
    """In place of the staged buffer, or of what arrives."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = dict(self._weights.tensors())
        if _fault is not None:
            FAULTS[_fault](tensors)
        yield from tensors.items()


def _refresh(model: Any, model_config: Any) -> None:
    if _fault != "stale_head":
        _refresh_tied_head(model, model_config)


worker._refresh_tied_head = _refresh


class WorkerExtension(worker.WorkerExtension):
    def set_fault(self, *, fault: str | None) -> None:
        global _fault
        _fault = fault

    def load_staged(self, *, version: int) -> str | None:
        with _faulty_weights():
            return super().load_staged(version=version)

    def load_directly(self, **transfer: Any) -> list[Any]:
        with _faulty_weights():
            return super().load_directly(**transfer)


@contextlib.contextmanager
def _faulty_weights() -> Iterator[None]:
    usual = worker.StagedWeights.receive_weights
    worker.StagedWeights.receive_weights = lambda engine, info: usual(  # type: ignore[method-assign]
        engine,
        worker.UpdateInfo(weights=_Faulty(info.weights)),  # type: ignore[arg-type]
    )
    try:
        yield
    finally:
        worker.StagedWeights.receive_weights = usual  # type: ignore[method-assign]
