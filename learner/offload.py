"""Models that live in host memory while they are not in use: verl's `param_offload`, `optimizer_offload`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from common.logs import LOGGER

HOST = torch.device("cpu")
_log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Offload:
    """What of a model goes to `host` when its work is done."""

    weights: bool
    optimizer: bool
    device: torch.device
    host: torch.device = HOST

    def __post_init__(self) -> None:
        if self.asked and not self.acts:
            _log.info("offloading moves nothing: this rank computes in host memory")

    @property
    def asked(self) -> bool:
        return self.weights or self.optimizer

    @property
    def acts(self) -> bool:
        return self.asked and self.device != self.host


@contextmanager
def at_work(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Within, the weights of an actor or critic (and the optimizer's state, if one is given) are on the device."""
    offload = module.offload
    if offload is None or not offload.acts:
        yield
        return
    _move(module, optimizer, offload, offload.device)
    try:
        yield
    finally:
        put_away(module, optimizer)


def put_away(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """To the host, what is to be there."""
    if module.offload.acts:
        _move(module, optimizer, module.offload, module.offload.host)


def _move(module: nn.Module, optimizer: torch.optim.Optimizer | None, offload: Offload, to: torch.device) -> None:
    if offload.weights:
        module.to(to)
    for state in optimizer.state.values() if optimizer is not None and offload.optimizer else ():
        for name, value in state.items():
            if name != "step":  # counted on the host in any case
                state[name] = value.to(to)
    if to.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what was freed is for another model, or for a generator on the same GPU
