"""The NCCL group with a simulated communicator: staging, watchdog, abort. Between GPUs it has not run yet."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
import torch

from common.errors import WeightError
from common.transfer import NcclGroup, StoreTransport, join_group

TICKET: Any = None


class SimulatedCommunicator:
    """One end of a broadcast from rank 0 over queues. A peer that does not come blocks it until `abort`."""

    def __init__(self, rank: int, wires: list[queue.Queue[torch.Tensor]], *, error: str = "") -> None:
        self.rank, self.wires, self.error = rank, wires, error
        self.aborted = threading.Event()
        self.aborted_by: threading.Thread | None = None

    def broadcast(self, tensors: list[torch.Tensor], root: int) -> SimulatedCommunicator:
        assert root == 0 and len(tensors) == 1
        self._tensor = tensors[0]
        return self

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)
        if self.rank == 0:
            for wire in self.wires:
                wire.put(self._tensor.clone())
            return
        while not self.aborted.is_set():
            try:
                self._tensor.copy_(self.wires[self.rank - 1].get(timeout=0.01))
                return
            except queue.Empty:
                pass

    def abort(self) -> None:
        self.aborted_by = threading.current_thread()
        self.aborted.set()


def make_group(rank: int, communicator: Any, timeout_s: float = 5.0) -> NcclGroup:
    return NcclGroup(TICKET, TICKET, rank, 3, timeout_s, communicator=communicator, device="cpu")


def test_buckets_of_any_size_reach_all_workers_through_one_device_buffer() -> None:
    wires: list[queue.Queue[torch.Tensor]] = [queue.Queue(), queue.Queue()]
    groups = [make_group(r, SimulatedCommunicator(r, wires)) for r in range(3)]
    buckets = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in (1000, 1000, 17)]
    for b in buckets:
        groups[0].send(b)
    where = groups[0]._staging.data_ptr()
    for worker in groups[1:]:
        for b in buckets:
            got = torch.zeros_like(b)
            worker.receive(got)
            assert torch.equal(got, b)
    assert groups[0]._staging.data_ptr() == where and groups[0]._staging.numel() == 1000


def test_the_watchdog_aborts_from_another_thread_what_never_ends() -> None:
    communicator = SimulatedCommunicator(1, [queue.Queue(), queue.Queue()])
    group = make_group(1, communicator, timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(WeightError, match=r"NCCL: aborted, by the watchdog after 0.3 s"):
        group.receive(torch.zeros(8, dtype=torch.uint8))
    assert 0.25 < time.monotonic() - start < 2
    assert communicator.aborted_by is not threading.current_thread()
    with pytest.raises(WeightError):  # and it stays aborted
        group.receive(torch.zeros(8, dtype=torch.uint8))


def test_an_abort_on_demand_an_error_and_a_closed_group() -> None:
    communicator = SimulatedCommunicator(1, [queue.Queue(), queue.Queue()])
    group = make_group(1, communicator, timeout_s=30)
    threading.Timer(0.2, group.abort).start()
    start = time.monotonic()
    with pytest.raises(WeightError, match="aborted"):
        group.receive(torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - start < 5
    broken = make_group(0, SimulatedCommunicator(0, [], error="ncclRemoteError: remote process exited\nfoo"))
    with pytest.raises(WeightError, match=r"NCCL: ncclRemoteError: remote process exited$"):
        broken.send(torch.zeros(8, dtype=torch.uint8))
    broken.close()
    broken.close()
    assert broken._communicator is None
    with pytest.raises(WeightError, match="closed"):
        broken.send(torch.zeros(8, dtype=torch.uint8))


def test_a_transport_that_is_not_known_here_is_refused_by_name() -> None:
    from common.transfer import Ticket

    with pytest.raises(WeightError, match="transport pigeon: not known here"):
        join_group(Ticket("pigeon", "127.0.0.1", 1, "x"), rank=1, world_size=2, timeout_s=1)


@pytest.mark.gpu
def test_one_rank_on_a_gpu() -> None:
    """Makes the communicator, sends a bucket to nobody, aborts in time."""
    transport = StoreTransport("127.0.0.1", timeout_s=60, name="nccl")
    group = transport.open_group(transport.announce(1, 1), 0)
    bucket = torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8)
    for _ in range(3):
        group.send(bucket)
    got = torch.zeros_like(bucket)
    group._staging.zero_()  # type: ignore[attr-defined]
    group.send(bucket)
    got.copy_(group._staging[: len(bucket)])  # type: ignore[attr-defined]
    assert torch.equal(got, bucket)
    start = time.monotonic()
    group.close()
    assert time.monotonic() - start < 10
    transport.close()
