"""One version of the weights on the learner: copied out, sealed with digests, sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from common.buffers import Buffer, Watermark
from common.canary import Canary
from common.errors import WeightError
from common.failpoints import failpoint
from common.transfer import Group, first_line
from common.weights import Manifest

SEAL_S = 600.0  # longest time in which no byte more is copied out, and that the digests take after the last


@dataclass(eq=False)
class Version:
    """One version in host memory. ``users`` (transfers, sealing) keep its buffer from being reused."""

    version: int
    buffer: Buffer
    users: int = 0
    layout: Manifest | None = None
    filled: Watermark = field(default_factory=Watermark)  # how much of it is copied out
    sealed: Watermark = field(default_factory=Watermark)  # raised to 1 once `digests` are there
    digests: torch.Tensor | None = None  # [8 · tensors] uint8
    canary: Canary | None = None  # made when the first load of it is to be proven
    proving: threading.Lock = field(default_factory=threading.Lock)
    withdrawn: bool = False

    def withdraw(self, reason: str) -> None:
        """It will never be whole: transfers of it end."""
        self.withdrawn = True
        self.filled.fail(reason)
        self.sealed.fail(reason)

    def make_canary(self, forward: Callable[[Iterable[tuple[str, torch.Tensor]]], Canary]) -> None:
        """Once, however many transfers need it at the same time. Raises what ``forward`` raises."""
        assert self.layout is not None
        self.filled.wait_for(self.layout.total_bytes, SEAL_S)
        with self.proving:
            if self.canary is None:
                self.canary = forward(self.buffer.tensors())

    def send(self, group: Group, ended: threading.Event, proof: Watermark | None = None) -> None:
        """All buckets, each once it is copied out; then the digests, once ``proof``, if any, is there: with them the
        version is complete for the engine. Raises WeightError.
        """
        layout = self.layout
        assert layout is not None
        for index in range(layout.num_buckets):
            failpoint("publish.bucket")
            self.filled.wait_for(layout.bucket(index).stop, SEAL_S)
            if ended.is_set():
                raise WeightError("ended")
            _send(group, self.buffer.bytes[layout.bucket(index)], f"bucket {index} of {layout.num_buckets}")
        self.sealed.wait_for(1, SEAL_S)
        if proof is not None:
            proof.wait_for(1, SEAL_S)
        if ended.is_set():
            raise WeightError("ended")
        assert self.digests is not None
        _send(group, self.digests, "digests")


def _send(group: Group, data: torch.Tensor, what: str) -> None:
    try:
        group.send(data)
    except (RuntimeError, WeightError) as e:
        raise WeightError(f"{what}: {first_line(e)}") from None
