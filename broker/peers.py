"""The generators that speak with the broker, by connection and by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

_KEPT_INCARNATIONS = 1_000
_WINDOW_S = 10.0  # seconds over which rates are measured


@dataclass(slots=True)
class Peer:
    """One generator process."""

    identity: bytes  # of its connection
    name: str
    incarnation: str
    version: int = -1  # weights held
    capacity: int = 0  # samples it is willing to hold
    heard_at: float = 0.0  # broker's clock
    stats: dict[str, float] = field(default_factory=dict)
    reports: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)  # (time, figures), latest seconds
    waits_for: str | None = None  # why nothing is leased to it
    waits_since: float = 0.0

    def report(self, stats: dict[str, float], now: float) -> None:
        """The figures of a heartbeat."""
        self.stats = stats
        self.reports.append((now, stats))
        while self.reports[0][0] < now - _WINDOW_S and len(self.reports) > 2:
            self.reports.popleft()

    @property
    def tokens_per_s(self) -> float:
        (start, first), (end, last) = (self.reports[0], self.reports[-1]) if self.reports else ((0.0, {}), (0.0, {}))
        return max(0.0, last.get("tokens", 0.0) - first.get("tokens", 0.0)) / (end - start) if end > start else 0.0

    @property
    def idle_ratio(self) -> float | None:
        """Mean over the latest reports; None: it has said nothing of it."""
        found = [stats["idle_ratio"] for _, stats in self.reports if "idle_ratio" in stats]
        return sum(found) / len(found) if found else None


class Peers:
    def __init__(self) -> None:
        self._by_name: dict[str, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._superseded: dict[tuple[str, str], None] = {}  # (name, incarnation), oldest first
        self._turn = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_name.values())

    def get(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def named(self, name: str) -> Peer | None:
        return self._by_name.get(name)

    def is_superseded(self, name: str, incarnation: str) -> bool:
        """Whether a later process took this name."""
        return (name, incarnation) in self._superseded

    def greet(self, identity: bytes, name: str, incarnation: str, now: float) -> tuple[Peer, Peer | None]:
        """A process introduces itself (again): its record, and that of the process it replaces, if any."""
        peer, replaced = self._by_name.get(name), None
        if peer is not None and peer.incarnation != incarnation:
            replaced, peer = peer, None
            self._superseded[name, replaced.incarnation] = None
            while len(self._superseded) > _KEPT_INCARNATIONS:
                del self._superseded[next(iter(self._superseded))]
            self._by_identity.pop(replaced.identity, None)
        if peer is None:
            peer = self._by_name[name] = Peer(identity, name, incarnation)
        elif peer.identity != identity:
            self._by_identity.pop(peer.identity, None)
            peer.identity = identity
        self._by_identity[identity] = peer
        peer.heard_at = now
        return peer, replaced

    def remove(self, peer: Peer) -> None:
        self._by_identity.pop(peer.identity, None)
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]

    def in_turn(self) -> list[Peer]:
        """All, beginning with another one each time."""
        peers = list(self._by_name.values())
        if not peers:
            return []
        self._turn = (self._turn + 1) % len(peers)
        return peers[self._turn :] + peers[: self._turn]

    def figures(self) -> dict[str, float | None]:
        """What the generators report, summed or averaged over them; None: nobody has reported it."""
        peers = list(self._by_name.values())
        idle = [ratio for p in peers if (ratio := p.idle_ratio) is not None]
        return {
            "generator/count": len(peers),
            "generator/idle_ratio": sum(idle) / len(idle) if idle else None,
            "generator/tokens_per_s": sum(p.tokens_per_s for p in peers),
            "generator/num_running": sum(p.stats.get("running", 0.0) for p in peers),
            "generator/version_min": min((p.version for p in peers), default=None),
            "generator/version_max": max((p.version for p in peers), default=None),
        }
