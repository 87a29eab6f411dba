"""The learner's process group: who this rank is, and the few collectives of a step.

Every rank holds the whole batch's small tensors ([batch, response]); only forward and backward are
divided, so that statistics and denominators are global without a collective of their own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import ConfigError, LeewayError, Stopped
from learner.plain import pack, unpack

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Rank 0 may wait for the broker as long as a pause lasts; its own waits have deadlines, and a rank
# that dies closes its connections.
LINE_TIMEOUT = timedelta(days=30)
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the learner's."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # of `fully_shard`: [ranks], or [copies of the model, ranks that share one]
    line: dist.ProcessGroup | None = None  # what rank 0 says to the others; None: alone
    asking: list[bool] = field(default_factory=list)  # not empty: within `share`, on rank 0
    split: int = 1  # neighbouring ranks that divide the columns of the same rows among them (Ulysses)
    split_group: dist.ProcessGroup | None = None  # they; None: each rank has rows of its own
    data_group: dist.ProcessGroup | None = None  # one of each of them; None: all ranks

    @property
    def first(self) -> bool:
        """Rank 0 speaks for the learner: broker, weights, metrics, files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of the rows is this rank's."""
        return self.rank // self.split

    @property
    def data_size(self) -> int:
        """Into how many shares rows are dealt out."""
        return self.world_size // self.split

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the shares of the rows, in place. (Ranks that divide the same rows hold the same.)"""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor

    def share(self, ask: Callable[[], T]) -> T:
        """What `ask()` returns on rank 0, on every rank; it is called nowhere else.

        Raises on every rank what it raises there: Stopped, or else a LeewayError with its text and
        exit code. Any other exception ends rank 0, and with it the others. Within another `share` it
        is just the call. The answer is plain data (`learner/plain.py`).
        """
        if self.line is None or self.asking:
            return ask()
        if not self.first:
            return _heard(*unpack(self._broadcast(None)))
        self.asking.append(True)
        try:
            answer = ask()
        except LeewayError as e:
            self._broadcast(pack(_told(e)))
            raise
        finally:
            self.asking.clear()
        self._broadcast(pack(("answer", answer, 0)))
        return answer

    def pool(self, make: Callable[[], NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """What `make()` returns on each rank, in their order, on every rank.

        Raises on every rank what it raises on one (the first of them), as `share` does: a rank that fails
        still takes part, so that none waits for it. Needs several ranks.
        """
        raised: LeewayError | None = None
        try:
            own = make()
        except LeewayError as e:
            raised, own = e, np.frombuffer(pack(_told(e)), dtype=np.uint8)
        head = torch.tensor([len(own), raised is not None])
        heads = [torch.empty_like(head) for _ in range(self.world_size)]
        dist.all_gather(heads, head, group=self.line)
        sizes, failed = torch.stack(heads).T.tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded.numpy()[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=self.line)
        for rank in np.flatnonzero(failed):
            if rank == self.rank and raised is not None:
                raise raised
            _heard(*unpack(parts[rank][: sizes[rank]].numpy().tobytes()))
        return [part[:size].numpy() for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, message: bytes | None) -> bytes:
        """Rank 0's message, on every rank."""
        size = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(size, 0, group=self.line)
        body = torch.empty(int(size), dtype=torch.uint8)
        if message is not None:
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self.line)
        return body.numpy().tobytes()


def _told(error: LeewayError) -> tuple[str, str, int]:
    """An error for other ranks."""
    return "stopped" if isinstance(error, Stopped) else "raised", str(error), error.exit_code


def _heard(kind: str, what: Any, exit_code: int) -> Any:
    if kind == "answer":
        return what
    error = Stopped(what) if kind == "stopped" else LeewayError(what)
    error.args, error.exit_code = (what,), exit_code
    raise error


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
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"trainer.nproc_per_node: this host has {torch.cuda.device_count()} GPUs, which is less than its "
                "learner ranks; lower it"
            )
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    store = _store(rank, world_size, host, int(os.environ.get("MASTER_PORT", "0")), timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    line = dist.new_group(backend="gloo", timeout=LINE_TIMEOUT) if world_size > 1 else None
    return Ranks(rank, world_size, device, init_device_mesh(device.type, (world_size,)), line)


def arrange(ranks: Ranks, *, split: int, shard_size: int) -> Ranks:
    """The same ranks with other tasks. Every rank must call it alike.

    split: ranks that divide the columns of the same rows; shard_size: ranks that share one copy of the
    models, −1 for all.
    Raises:
        ConfigError: the ranks do not divide so.
    """
    n, kind = ranks.world_size, ranks.device.type
    for key, size in (("ulysses_sequence_parallel_size", split), ("fsdp_config.fsdp_size", shard_size)):
        if size != -1 and n % size:
            raise ConfigError(f"actor.{key}={size}: does not divide the learner's {n} ranks")
    if shard_size not in (-1, n):
        mesh = init_device_mesh(kind, (n // shard_size, shard_size), mesh_dim_names=("copies", "shards"))
        ranks = replace(ranks, mesh=mesh)
    if split > 1:
        grid = init_device_mesh(kind, (n // split, split), mesh_dim_names=("data", "split"))
        ranks = replace(ranks, split=split, split_group=grid.get_group("split"), data_group=grid.get_group("data"))
    return ranks


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
