"""Weights in chunks over ZeroMQ: for an engine that is new, was cut off, or has no other way.

The same seam as the process groups of ``common/transfer.py``. The learner binds a socket for each
transfer; the engine's workers dial it, show the transfer's secret, and take chunks. A worker may
be ``WINDOW`` chunks behind, so a slow one holds no memory but its own window. Chunks are sent from
the host buffer and received into the worker's, without copies of ours in between.
"""

from __future__ import annotations

import threading
import time

import torch

from common.errors import WeightError
from common.sockets import Dealer, Router, Waker
from common.transfer import Ticket, new_prefix
from common.wire import SNAPSHOT_OPS, decode, encode

CHUNK_BYTES = 1 << 20
WINDOW = 8  # chunks on their way to one worker
LAST_WORDS_S = 0.2  # at the end the socket lingers so long


class SnapshotSender:
    """The learner's end of one transfer; of the transfer's thread, but for ``abort``."""

    on_device = False

    def __init__(self, router: Router, waker: Waker, peers: list[bytes], timeout_s: float) -> None:
        self._router, self._waker, self._timeout_s = router, waker, timeout_s
        self._credit = dict.fromkeys(peers, WINDOW)
        self._left: set[bytes] = set()  # who has everything, or gave up
        self._aborted = self._closed = False
        self._lock = threading.Lock()  # guards the waker against `close`

    def send(self, bucket: torch.Tensor) -> None:
        """To all workers; ``bucket`` must stand until they have said that they have everything."""
        data = bucket.numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            for peer in self._credit:
                self._wait_for_credit(peer)
                if not self._router.send(peer, encode("chunk", size=len(chunk)), chunk):
                    raise WeightError(f"worker {_worker(peer)} is gone")
                self._credit[peer] -= 1

    def _tell(self, frames: list[bytes]) -> None:
        """The same to all workers. Raises WeightError."""
        for peer in self._credit:
            if not self._router.send(peer, frames):
                raise WeightError(f"worker {_worker(peer)} is gone")

    def receive(self, bucket: torch.Tensor) -> None:
        raise WeightError("the learner receives nothing")

    def _wait_for_credit(self, peer: bytes) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._credit[peer] <= 0:
            if peer in self._left:
                raise WeightError(f"worker {_worker(peer)} gave up")
            left = deadline - time.monotonic()
            if self._aborted:
                raise WeightError("aborted")
            if left <= 0:
                raise WeightError(f"worker {_worker(peer)} took nothing for {self._timeout_s:g} s")
            message = self._router.receive(left)
            if message is not None and message[0] in self._credit:
                op, fields, _ = decode(message[1], SNAPSHOT_OPS)
                if op == "bye":
                    self._left.add(message[0])
                elif op == "credit":
                    self._credit[message[0]] += fields["count"]

    def abort(self) -> None:
        """From another thread: a ``send`` that waits fails at once."""
        self._aborted = True
        with self._lock:
            if not self._closed:
                self._waker.wake()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for peer in self._credit:
            self._router.send(peer, encode("end"))
        self._router.close(LAST_WORDS_S)


class SnapshotReceiver:
    """A worker's end of one transfer."""

    on_device = False

    def __init__(self, dealer: Dealer, timeout_s: float) -> None:
        self._dealer, self._timeout_s = dealer, timeout_s
        self._closed = False

    def receive(self, bucket: torch.Tensor) -> None:
        """From the learner; returns when ``bucket`` is full."""
        view = bucket.numpy().data
        while view:
            view = view[self._receive_chunk(view) :]

    def _receive_chunk(self, view: memoryview) -> int:
        """Its size. The header says it, and the next frame goes where it belongs."""
        got = self._dealer.receive_into(self._timeout_s, view)
        if got is None:
            raise WeightError(f"the learner sent nothing for {self._timeout_s:g} s")
        header, size = got
        op, fields, _ = decode([header], SNAPSHOT_OPS)
        if op != "chunk":
            raise WeightError("the learner ended the transfer")
        if fields["size"] != size or size > len(view) or size == 0:
            raise WeightError(f"a chunk of {size} bytes, announced as {fields['size']}, where {len(view)} are missing")
        self._dealer.send(encode("credit", count=1))
        return size

    def send(self, bucket: torch.Tensor) -> None:
        raise WeightError("a worker sends nothing")

    def abort(self) -> None:
        """Nothing to do: each wait has its limit."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._dealer.send(encode("bye"))
            self._dealer.close(LAST_WORDS_S)


class SnapshotTransport:
    """The learner's side: a socket for each transfer, from its announcement on."""

    name = "snapshot"
    sender: type[SnapshotSender] = SnapshotSender

    def __init__(self, host: str, *, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._waiting: dict[str, tuple[Router, Waker]] = {}  # by prefix
        self._lock = threading.Lock()

    def announce(self, epoch: int, number: int) -> Ticket:
        router = Router(self._host)
        prefix = new_prefix(epoch, number)
        with self._lock:
            self._waiting[prefix] = (router, router.waker())
        return Ticket(self.name, self._host, int(router.address.rpartition(":")[2]), prefix)

    def open_group(self, ticket: Ticket, num_workers: int) -> SnapshotSender:
        """Wait for the engine's workers.

        Raises:
            WeightError: they did not come within the timeout.
        """
        router, waker = self._take(ticket)
        deadline = time.monotonic() + self._timeout_s
        peers: list[bytes] = []
        try:
            while len(peers) < num_workers:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WeightError(f"{len(peers)} of {num_workers} workers came within {self._timeout_s:g} s")
                message = router.receive(left)
                if message is not None and _is_pull(message[1], ticket.prefix) and message[0] not in peers:
                    peers.append(message[0])
        except BaseException:
            router.close()
            raise
        for peer in peers:
            router.send(peer, encode("go"))
        return self.sender(router, waker, peers, self._timeout_s)

    def cancel(self, ticket: Ticket) -> None:
        """Let the workers that have come already give up at once."""
        with self._lock:
            if ticket.prefix not in self._waiting:
                return
        router, _ = self._take(ticket)
        while (message := router.receive(0)) is not None:
            router.send(message[0], encode("end"))
        router.close(LAST_WORDS_S)

    def close(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for router, _ in waiting.values():
            router.close()

    def _take(self, ticket: Ticket) -> tuple[Router, Waker]:
        with self._lock:
            if ticket.prefix not in self._waiting:
                raise WeightError("the transfer was cancelled")
            return self._waiting.pop(ticket.prefix)


def pull(
    ticket: Ticket, *, rank: int, timeout_s: float, receiver: type[SnapshotReceiver] = SnapshotReceiver
) -> SnapshotReceiver:
    """A worker's side: dial the learner and wait until it says go.

    Raises:
        WeightError: cancelled, or the learner is gone or did not come within the timeout.
    """
    dealer = Dealer(f"tcp://{ticket.host}:{ticket.port}", f"worker-{rank}".encode())
    dealer.send(encode("pull", prefix=ticket.prefix))
    answer = dealer.receive(timeout_s)
    if answer is None or decode(answer, SNAPSHOT_OPS)[0] != "go":
        dealer.close()
        why = "cancelled the transfer" if answer else f"did not begin within {timeout_s:g} s"
        raise WeightError(f"the learner at {ticket.host}:{ticket.port} {why}")
    return receiver(dealer, timeout_s)


def _is_pull(frames: list[bytes], prefix: str) -> bool:
    op, fields, _ = decode(frames, SNAPSHOT_OPS)
    return op == "pull" and fields["prefix"] == prefix


def _worker(peer: bytes) -> str:
    return peer.decode(errors="replace").removeprefix("worker-")
