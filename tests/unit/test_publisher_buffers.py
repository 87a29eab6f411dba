"""The copies of versions that a publisher holds, while its control thread is slow."""

from __future__ import annotations

import threading
import time

import torch

from common.config import Weights
from learner.publish import Publisher


def until(condition, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.01)


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
