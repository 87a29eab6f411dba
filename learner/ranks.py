"""The learner's process group: who this rank is, and the few collectives of a step.

Every rank holds the whole batch's small tensors ([batch, response]); only forward and backward are
divided, so that statistics and denominators are global without a collective of their own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import LeewayError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Ranks:
    """This process among the learner's."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        """Rank 0 speaks for the learner: broker, weights, metrics, files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def join_ranks(*, timeout_s: float = 600.0) -> Ranks:
    """Make the process group from the launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT); alone without them.

    TCPStore listens on all interfaces whatever host it is given, so rank 0 hands it a socket bound
    to MASTER_ADDR.

    Raises:
        LeewayError: the rendezvous address cannot be bound.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = timedelta(seconds=timeout_s)
    if host in LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    store = _store(rank, world_size, host, int(os.environ.get("MASTER_PORT", "0")), timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(rank, world_size, device, init_device_mesh(device.type, (world_size,)))


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(rank: int, world_size: int, host: str, port: int, timeout: timedelta) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    if rank != 0:
        return dist.TCPStore(host, port, world_size, False, timeout)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        raise LeewayError(f"learner rank 0 cannot listen on {host}:{port} ({e.strerror}); is the port taken?") from e
    listener.listen(128)
    return dist.TCPStore(host, port, world_size, True, timeout, master_listen_fd=listener.detach())
