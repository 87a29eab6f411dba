"""What the broker answers to whom. Everything but the socket: messages in, messages out.

One turn: the messages that have come are handled, expired leases dropped, a waiting claim tried,
groups leased; then all of it is committed in one transaction, and only then what was answered
goes out. So an acknowledgement is never ahead of the disk.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from broker.ledger import Ledger
from broker.overlap import Overlap
from broker.peers import Peers
from broker.prompts import Prompts
from broker.records import Lane
from broker.store import NewSample, Store
from common.config import Config
from common.failpoints import failpoint
from common.wire import encode


class Directory(Protocol):
    """What the broker wants to know from run control (`common/control.py`)."""

    def desired(self) -> str: ...

    def limit(self, name: str) -> Any: ...

    def entry(self, name: str) -> Any: ...

    def model(self) -> str | None: ...


@dataclass
class Parked:
    """A claim that waits for groups."""

    peer: bytes
    id: int
    epoch: int
    step: int
    version: int
    num_groups: int
    since: float
    told_at: float = -1e9
    reason: str = ""


@dataclass
class Service:
    """The state that the handlers of both sides share."""

    config: Config
    ledger: Ledger
    store: Store
    prompts: dict[Lane, Prompts]
    directory: Directory
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    peers: Peers = field(default_factory=Peers)
    overlap: Overlap = field(default_factory=Overlap)
    parked: Parked | None = None
    closing: bool = False  # nothing is leased any more
    vocab_size: int | None = None
    refused: Counter[str] = field(default_factory=Counter)  # messages, by reason
    counted: Counter[str] = field(default_factory=Counter)  # samples: stored, duplicate, late, refused
    learner_heard_at: float | None = None
    handed_out_at: dict[int, float] = field(default_factory=dict)  # steps at the learner
    fetched: Counter[str] = field(default_factory=Counter)  # payloads, by the name of the learner's connection
    _samples: list[NewSample] = field(default_factory=list)
    _outbox: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    _acks: dict[bytes, list[tuple[int, int, int]]] = field(default_factory=dict)

    def send(self, peer: bytes, op: str, *payload: bytes, **fields: Any) -> None:
        """Goes out after the next commit."""
        self._outbox.append((peer, encode(op, *payload, **fields)))

    def acknowledge(self, peer: bytes, key: tuple[int, int, int]) -> None:
        self._acks.setdefault(peer, []).append(key)

    def keep(self, sample: NewSample) -> None:
        self._samples.append(sample)

    def commit(self) -> None:
        """One transaction for everything since the last one.

        Raises:
            LedgerError: it could not be written.
        """
        changes = self.ledger.take_changes()
        self.store.commit(changes, self._samples)
        self._samples = []

    def take_outbox(self) -> list[tuple[bytes, list[bytes]]]:
        """What may go out now: acknowledgements first. Call after ``commit``."""
        out = [(peer, encode("acks", keys=keys)) for peer, keys in self._acks.items()]
        out += self._outbox
        self._outbox, self._acks = [], {}
        if out:
            failpoint("broker.before_send")
        return out
