"""Process groups that carry weights: one group for one transfer to one engine.

A group is the learner (rank 0) and the workers of one engine (ranks 1…). It lives for one
transfer, under a rendezvous prefix that is never used again, so a torn transfer leaves nothing
behind that a later one could trip over, and an engine that dies or freezes holds up only its own.
Every call ends within the group's timeout. Data and rendezvous are plaintext on loopback.

``open_group`` is the seam for other transports.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from common.errors import WeightError

_GO, _CANCELLED = b"go", b"cancelled"


class Group(Protocol):
    def send(self, bucket: torch.Tensor) -> None:
        """Rank 0: to all other ranks; returns when ``bucket`` may be overwritten."""

    def receive(self, bucket: torch.Tensor) -> None:
        """Other ranks: from rank 0; returns when ``bucket`` is full."""

    def close(self) -> None:
        """Give up the connections; a peer that waits for this rank fails at once."""


class GlooGroup:
    """A group over gloo, with point-to-point sends."""

    def __init__(self, store: TCPStore, host: str, prefix: str, rank: int, world_size: int, timeout_s: float) -> None:
        gloo: Any = ProcessGroupGloo  # its stub lacks most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]  # else it listens where the host name points
        options._timeout = timedelta(seconds=timeout_s)
        self._peers = range(1, world_size)
        self._group: Any = gloo(PrefixStore(prefix, store), rank, world_size, options)

    def send(self, bucket: torch.Tensor) -> None:
        group = self._open()
        for work in [group.send([bucket], peer, 0) for peer in self._peers]:
            work.wait()

    def receive(self, bucket: torch.Tensor) -> None:
        self._open().recv([bucket], 0, 0).wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _open(self) -> Any:
        if self._group is None:
            raise WeightError("the group is closed")
        return self._group

    def __enter__(self) -> GlooGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Rendezvous:
    """The learner's side: a key-value store on loopback where the ranks of a group find one another."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        self.host = host
        self._timeout_s = timeout_s
        listener = socket.create_server((host, 0), backlog=512)
        self.port: int = listener.getsockname()[1]
        # TCPStore itself would listen on all interfaces; it takes over the descriptor.
        self._server: TCPStore | None = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    @staticmethod
    def new_prefix(epoch: int, number: int) -> str:
        """A prefix that nobody can have used before, nor guess."""
        return f"weights/{epoch}/{number}/{secrets.token_hex(16)}"

    def open_group(self, prefix: str, num_workers: int) -> GlooGroup:
        """Let the workers that wait at ``prefix`` go on, and make the group with them.

        Each caller has its own connection to the store: a wait holds the connection.

        Raises:
            WeightError: they did not come within the timeout.
        """
        store = _connect(self.host, self.port, self._timeout_s)
        try:
            store.set(prefix, _GO.decode())
            return GlooGroup(store, self.host, prefix, 0, 1 + num_workers, self._timeout_s)
        except RuntimeError as e:
            raise WeightError(f"no group: {first_line(e)}") from None

    def cancel(self, prefix: str) -> None:
        """Let the workers that wait at ``prefix`` give up at once."""
        if self._server is not None:
            self._server.set(prefix, _CANCELLED.decode())

    def close(self) -> None:
        self._server = None


def join_group(host: str, port: int, prefix: str, *, rank: int, world_size: int, timeout_s: float) -> GlooGroup:
    """A worker's side: wait until the learner says go, then make the group.

    Raises:
        WeightError: cancelled, or the learner is gone or did not come within the timeout.
    """
    try:
        store = _connect(host, port, timeout_s)
        store.wait([prefix], timedelta(seconds=timeout_s))
        if store.get(prefix) != _GO:
            raise WeightError("the learner cancelled the transfer")
        return GlooGroup(store, host, prefix, rank, world_size, timeout_s)
    except RuntimeError as e:
        raise WeightError(f"no group with the learner at {host}:{port}: {first_line(e)}") from None


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def first_line(error: Exception) -> str:
    """What gloo and the store say, without their source lines and advice."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    text = text.rpartition("] ")[2] if text.startswith("[") else text
    return text.partition(". This is typically")[0]
