"""The seam of the transports that carry weights, and those made of torch's process groups.

A group is the learner (rank 0) and the workers of one engine (ranks 1…). It is made under a
rendezvous prefix that is never used again and lives until its first fault: after a transfer that went
well both sides keep it for the next one, anything else closes it. So a torn transfer leaves nothing
behind that a later one could trip over, and an engine that dies or freezes holds up only its own.
Every call ends within the group's timeout. Data and rendezvous are plaintext on loopback.

    gloo      host memory to host memory
    nccl      GPU memory to GPU memory, staged in buckets; written, not yet run on two GPUs
    snapshot  chunks over ZeroMQ (``common/snapshot.py``)
    file      a folder that both sides see (``common/file_snapshot.py``)
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from common.errors import WeightError

_GO, _CANCELLED = b"go", b"cancelled"


class Group(Protocol):
    on_device: bool  # whether ``receive`` fills device memory as well as host memory

    def send(self, bucket: torch.Tensor) -> None:
        """Rank 0: to all other ranks. ``bucket`` must stand until they have said that they have everything."""

    def receive(self, bucket: torch.Tensor) -> None:
        """Other ranks: from rank 0; returns when ``bucket`` is full."""

    def abort(self) -> None:
        """From another thread: let a running call fail soon; at the latest it fails at the timeout."""

    def close(self) -> None:
        """Give up the connections; a peer that waits for this rank fails at once."""


@dataclass(frozen=True)
class Ticket:
    """Where the workers of one engine meet the learner for one transfer."""

    transport: str
    host: str
    port: int
    prefix: str  # secret


class Transport(Protocol):
    """The learner's side of one way to carry weights."""

    name: str

    def announce(self, epoch: int, number: int) -> Ticket: ...

    def open_group(self, ticket: Ticket, num_workers: int) -> Group:
        """Let the workers that wait go on, and make the group with them. Raises WeightError."""

    def cancel(self, ticket: Ticket) -> None:
        """No group will be made: let the workers that wait give up."""

    def close(self) -> None: ...


class KeptGroups:
    """Groups between two transfers, by whom they are with. Thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[bytes, tuple[Ticket, Group]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def lasts(ticket: Ticket) -> bool:
        """Whether its group serves several transfers; a snapshot's does not."""
        return ticket.transport in _GROUPS

    def keep(self, peer: bytes, ticket: Ticket, group: Group) -> None:
        """After a transfer that went well. A group that does not last is closed."""
        before = None
        with self._lock:
            if self.lasts(ticket):
                before = self._groups.pop(peer, None)
                self._groups[peer] = (ticket, group)
        if not self.lasts(ticket):
            group.close()
        elif before is not None:
            before[1].close()

    def take(self, peer: bytes, transport: str) -> tuple[Ticket, Group] | None:
        """What is kept with a peer, if it is of this transport; another one is closed."""
        with self._lock:
            kept = self._groups.pop(peer, None)
        if kept is not None and kept[0].transport != transport:
            kept[1].close()
            return None
        return kept

    def close_all_but(self, peers: Collection[bytes] = ()) -> None:
        with self._lock:
            gone = [self._groups.pop(peer) for peer in list(self._groups) if peer not in peers]
        for _, group in gone:
            group.close()


MakeGroup = Callable[["TCPStore", Ticket, int, int, float], Group]  # store, ticket, rank, world size, timeout


def new_prefix(epoch: int, number: int) -> str:
    """A prefix that nobody can have used before, nor guess."""
    return f"weights/{epoch}/{number}/{secrets.token_hex(16)}"


# ---------------------------------------------------------------- gloo
class GlooGroup:
    """A group over gloo, with point-to-point sends."""

    on_device = False

    def __init__(self, store: TCPStore, ticket: Ticket, rank: int, world_size: int, timeout_s: float) -> None:
        gloo: Any = ProcessGroupGloo  # its stub lacks most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=ticket.host)]  # else it listens where the host name points
        options._timeout = timedelta(seconds=timeout_s)
        self._peers = range(1, world_size)
        self._group: Any = gloo(PrefixStore(ticket.prefix, store), rank, world_size, options)

    def send(self, bucket: torch.Tensor) -> None:
        group = self._open()
        for work in [group.send([bucket], peer, 0) for peer in self._peers]:
            work.wait()

    def receive(self, bucket: torch.Tensor) -> None:
        self._open().recv([bucket], 0, 0).wait()

    def abort(self) -> None:
        """gloo cannot be interrupted; each call has its timeout."""

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _open(self) -> Any:
        if self._group is None:
            raise WeightError("the group is closed")
        return self._group


# ---------------------------------------------------------------- NCCL
class NcclGroup:
    """A group over NCCL. Buckets pass through one device buffer on each side; host memory holds the version.

    NCCL's own calls have no timeout, and some block in C (the first one makes the communicator), so
    each runs under a watchdog: a timer thread that aborts the communicator.
    """

    on_device = True

    def __init__(
        self,
        store: TCPStore,
        ticket: Ticket,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        communicator: Any = None,
        device: str = "cuda",
    ) -> None:
        """communicator: has ``broadcast``, ``abort`` and ``shutdown`` of ``ProcessGroupNCCL``; made here by default."""
        self._timeout_s, self._device = timeout_s, torch.device(device)
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._aborted = False
        self._lock = threading.Lock()
        if communicator is None:
            from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]

            self._device = torch.device("cuda", torch.cuda.current_device())
            nccl: Any = ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=timeout_s)
            communicator = nccl(PrefixStore(ticket.prefix, store), rank, world_size, options)
        self._communicator: Any = communicator

    def send(self, bucket: torch.Tensor) -> None:
        staged = self._room_for(bucket)
        staged.copy_(bucket)
        self._broadcast(staged)

    def receive(self, bucket: torch.Tensor) -> None:
        staged = self._room_for(bucket)
        self._broadcast(staged)
        bucket.copy_(staged)  # waits for the stream

    def _room_for(self, bucket: torch.Tensor) -> torch.Tensor:
        if self._staging.numel() < bucket.numel():
            self._staging = torch.empty(bucket.numel(), dtype=torch.uint8, device=self._device)
        return self._staging[: bucket.numel()]

    def _broadcast(self, staged: torch.Tensor) -> None:
        watchdog = threading.Timer(self._timeout_s, self.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            with self._lock:
                if self._communicator is None:
                    raise WeightError("the group is closed")
                communicator = self._communicator
            communicator.broadcast([staged], 0).wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # `wait` only orders streams
        except RuntimeError as e:
            raise WeightError(f"NCCL: {first_line(e)}") from None
        finally:
            watchdog.cancel()
        if self._aborted:  # an aborted operation may look complete
            raise WeightError(f"NCCL: aborted, by the watchdog after {self._timeout_s:g} s or on demand")

    def abort(self) -> None:
        self._aborted = True
        with self._lock:
            communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()  # `shutdown` would wait for peers that may be gone


# ---------------------------------------------------------------- rendezvous of both
class StoreTransport:
    """The learner's side: a key-value store on loopback where the ranks of a group find one another."""

    def __init__(self, host: str, *, timeout_s: float, name: str = "gloo") -> None:
        self.name, self._host, self._timeout_s = name, host, timeout_s
        listener = socket.create_server((host, 0), backlog=512)
        self._port: int = listener.getsockname()[1]
        # TCPStore itself would listen on all interfaces; it takes over the descriptor.
        self._server: TCPStore | None = TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def announce(self, epoch: int, number: int) -> Ticket:
        return Ticket(self.name, self._host, self._port, new_prefix(epoch, number))

    def open_group(self, ticket: Ticket, num_workers: int) -> Group:
        """Let the workers that wait go on, and make the group with them.

        Each caller has its own connection to the store: a wait holds the connection.

        Raises:
            WeightError: they did not come within the timeout.
        """
        store = _connect(ticket, self._timeout_s)
        try:
            store.set(ticket.prefix, _GO.decode())
            return _GROUPS[ticket.transport](store, ticket, 0, 1 + num_workers, self._timeout_s)
        except RuntimeError as e:
            raise WeightError(f"no group: {first_line(e)}") from None

    def cancel(self, ticket: Ticket) -> None:
        if self._server is not None:
            self._server.set(ticket.prefix, _CANCELLED.decode())

    def close(self) -> None:
        self._server = None


_GROUPS: dict[str, MakeGroup] = {"gloo": GlooGroup, "nccl": NcclGroup}


def join_group(ticket: Ticket, *, rank: int, world_size: int, timeout_s: float) -> Group:
    """A worker's side, whatever the transport: wait until the learner says go, then make the group.

    Raises:
        WeightError: cancelled, or the learner is gone or did not come within the timeout.
    """
    if ticket.transport == "snapshot":
        from common.snapshot import pull

        return pull(ticket, rank=rank, timeout_s=timeout_s)
    if ticket.transport == "file":
        from common.file_snapshot import read

        return read(ticket, rank=rank, timeout_s=timeout_s)
    if ticket.transport not in _GROUPS:
        raise WeightError(f"transport {ticket.transport}: not known here; run the same Leeway everywhere")
    try:
        store = _connect(ticket, timeout_s)
        store.wait([ticket.prefix], timedelta(seconds=timeout_s))
        if store.get(ticket.prefix) != _GO:
            raise WeightError("the learner cancelled the transfer")
        return _GROUPS[ticket.transport](store, ticket, rank, world_size, timeout_s)
    except RuntimeError as e:
        raise WeightError(f"no group with the learner at {ticket.host}:{ticket.port}: {first_line(e)}") from None


def _connect(ticket: Ticket, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(ticket.host, ticket.port, is_master=False, wait_for_workers=False, timeout=timeout)


def first_line(error: Exception) -> str:
    """What gloo and the store say, without their source lines and advice."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = text.rpartition("] ")[2] if text.startswith("[") else text
    return text.partition(". This is typically")[0]
