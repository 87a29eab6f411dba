"""The copies of versions that a publisher holds, while its control thread is slow."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import torch

from common.config import Weights
from learner.publish import Publisher


def until(condition, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


class MadeOneByOne:
    """Tensors that exist only while they are copied: each is made when the one before has gone."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.made: list[weakref.ref[torch.Tensor]] = []

    def kinds(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        return ((f"w{i}", "float32", (10, i + 1)) for i in range(5))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, _, shape in self.kinds():
            assert all(t() is None for t in self.made[:-1]), "several tensors are there at once"
            tensor = torch.full(shape, self.value)
            self.made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor


def test_no_publication_holds_the_whole_model_on_the_device() -> None:
    """The first one neither: described tensors are laid out before one of them is made."""
    publisher = Publisher(run_id="r", epoch=1, config=Weights(), dtype=torch.bfloat16)
    try:
        for version, value in enumerate((1.0, 2.0)):
            publisher.publish(version, MadeOneByOne(value))
            until(lambda v=version: publisher._is_announced(v))
            newest = publisher._newest
            assert newest is not None and [(e.dtype, e.shape) for e in newest.layout.entries] == [
                ("bfloat16", (10, i + 1)) for i in range(5)
            ]
            assert all(bool((t == value).all()) for _, t in newest.buffer.tensors())
        publisher.publish(2, [("another", torch.ones(3))])  # not described, and not as before
        until(lambda: publisher._is_announced(2))
        assert [e.name for e in publisher._newest.layout.entries] == ["another"]
    finally:
        publisher.close()


def test_the_newest_version_is_no_free_buffer_however_late_it_is_announced() -> None:
    """Its digests may be complete before the control thread has heard of it; the next version must not overwrite it."""
    publisher, gate = Publisher(run_id="r", epoch=1, config=Weights()), threading.Event()
    receive = publisher._router.receive

    def late(wait_s: float):
        assert gate.wait(30)
        return receive(wait_s)

    try:
        gate.set()
        publisher._router.receive = late
        for version in range(4):
            gate.clear()
            publisher.publish(version, [("w", torch.full((1000,), float(version)))])
            until(lambda v=version: all(t.name != f"seal-{v}" for t in threading.enumerate()))
            gate.set()
            until(lambda v=version: publisher._is_announced(v))
            with publisher._lock:
                newest = publisher._newest
                assert not any(free is newest.buffer for free in publisher._buffers)
                assert newest.buffer.bytes[:4].view(torch.float32).item() == version
    finally:
        gate.set()
        publisher.close()
