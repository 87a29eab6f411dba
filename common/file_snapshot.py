"""Weights from a folder that learner and engines share: the dialogue of a snapshot, without its bytes.

As in ``common/snapshot.py`` the workers dial the learner, show the secret, and are served bucket by bucket, so a
frozen or dead one is noticed as soon, and a transfer ends as soon. But a bucket's message only says that it may be
read (``common/stored.py``); the digests come over the socket. While the version is still being written the learner
says so, and the workers wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from common.errors import WeightError
from common.snapshot import SnapshotReceiver, SnapshotSender, SnapshotTransport, pull
from common.stored import Stored, StoredVersion
from common.transfer import Ticket
from common.weights import decode_manifest, encode_manifest
from common.wire import SNAPSHOT_OPS, decode, encode


class Shelf(Protocol):
    """Where the learner's stored versions are."""

    def take(self, ticket: Ticket, meanwhile: Callable[[], None]) -> Stored:
        """The version of this transfer, which then stays there; ``meanwhile`` is called now and then until it is there.

        Raises:
            WeightError: it cannot be written, or the transfer has ended.
        """

    def give_back(self, stored: Stored) -> None: ...


class FileSender(SnapshotSender):
    """The learner's end of one transfer; of the transfer's thread, but for ``abort``."""

    _shelf: tuple[Shelf, Ticket]
    _stored: Stored | None = None
    _unread = 0  # bytes of the version that the workers were not told of

    def serve(self, shelf: Shelf, ticket: Ticket) -> None:
        """Where the version of this transfer will be, once the first bucket is sent."""
        self._shelf = shelf, ticket

    def _open(self) -> None:
        """Wait until the version is written. A fault is raised before the workers hear of an end: it is the reason."""
        shelf, ticket = self._shelf
        self._stored = shelf.take(ticket, lambda: self._tell(encode("wait")))
        self._unread = self._stored.layout.total_bytes
        self._tell(encode("folder", encode_manifest(self._stored.layout), path=str(self._stored.path)))

    def send(self, bucket: torch.Tensor) -> None:
        if self._stored is None:
            self._open()
        if not self._unread:
            super().send(bucket)  # the digests
            return
        for peer in self._credit:
            self._wait_for_credit(peer)
            self._credit[peer] -= 1
        self._tell(encode("stored", size=len(bucket)))
        self._unread -= len(bucket)

    def close(self) -> None:
        super().close()
        stored, self._stored = self._stored, None
        if stored is not None:
            self._shelf[0].give_back(stored)


class FileReceiver(SnapshotReceiver):
    """A worker's end of one transfer."""

    _stored: StoredVersion | None = None
    _at = _total = 0  # bytes read, and to be read

    def receive(self, bucket: torch.Tensor) -> None:
        """Read from the folder; returns when ``bucket`` is full."""
        if self._stored is None:
            self._open()
        if self._at == self._total:
            super().receive(bucket)  # the digests
            return
        assert self._stored is not None
        op, fields, _ = self._next()
        if op != "stored" or fields["size"] != len(bucket):
            raise WeightError(f"the learner says {op}, where {len(bucket)} bytes of its folder are due")
        self._stored.read(self._at, bucket.numpy().data)
        self._at += len(bucket)
        self._dealer.send(encode("credit", count=1))

    def _open(self) -> None:
        """Wait until the version is there."""
        op, fields, payload = self._next()
        while op == "wait":
            op, fields, payload = self._next()
        if op != "folder" or len(payload) != 1:
            raise WeightError(f"the learner says {op}, where the folder of the version is due")
        layout = decode_manifest(payload[0])
        self._stored, self._total = StoredVersion(Path(fields["path"]), layout), layout.total_bytes

    def _next(self) -> tuple[str, dict[str, Any], list[bytes]]:
        frames = self._dealer.receive(self._timeout_s)
        if frames is None:
            raise WeightError(f"the learner said nothing for {self._timeout_s:g} s")
        op, fields, payload = decode(frames, SNAPSHOT_OPS)
        if op == "end":
            raise WeightError("the learner ended the transfer")
        return op, fields, payload

    def close(self) -> None:
        super().close()
        if self._stored is not None:
            self._stored.close()


class FileTransport(SnapshotTransport):
    """The learner's side."""

    name = "file"
    sender = FileSender

    def __init__(self, host: str, *, timeout_s: float, shelf: Shelf) -> None:
        super().__init__(host, timeout_s=timeout_s)
        self._shelf = shelf

    def open_group(self, ticket: Ticket, num_workers: int) -> FileSender:
        """Wait for the engine's workers; the first bucket then waits for the version to be written.

        Raises:
            WeightError: they did not come within the timeout.
        """
        sender = super().open_group(ticket, num_workers)
        assert isinstance(sender, FileSender)
        sender.serve(self._shelf, ticket)
        return sender


def read(ticket: Ticket, *, rank: int, timeout_s: float) -> FileReceiver:
    """A worker's side: as ``pull``."""
    receiver = pull(ticket, rank=rank, timeout_s=timeout_s, receiver=FileReceiver)
    assert isinstance(receiver, FileReceiver)
    return receiver
