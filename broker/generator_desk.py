"""The broker's side of the generators: who they are, what they are leased, what they deliver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker import parse
from broker.peers import Peer
from broker.records import Attempt
from broker.service import Service
from broker.store import NewSample
from common.errors import LedgerError, WireError
from common.wire import Spans, check_sample, pack

OPS = ("hello", "heartbeat", "sample", "give_back", "bye")
LOST_S = 5.0  # a generator silent for so long and without a registry entry is gone
QUIET_BEATS = 3  # heartbeats that may be missed before a generator gets nothing more
Fields = dict[str, Any]


class GeneratorDesk:
    """Consumes the messages ``OPS``. Produces leases, acknowledgements, cancellations, reasons to wait."""

    def __init__(self, service: Service) -> None:
        self._s = service
        self._began = service.clock()
        self._look_at = 0.0  # when generators are next looked through for lost ones
        self._handlers: dict[str, Callable[[Peer, Fields, list[bytes], float], None]] = {
            "heartbeat": self._heartbeat,
            "sample": self._sample,
            "give_back": self._give_back,
            "bye": self._bye,
        }

    def handle(self, identity: bytes, op: str, fields: Fields, payload: list[bytes]) -> None:
        """Raises WireError for what the schema leaves open and is wrong."""
        now = self._s.clock()
        if op == "hello":
            self._hello(identity, now, **fields)
            return
        peer = self._s.peers.get(identity)
        if peer is None:
            self._refuse(identity, op, "unknown_generator", "say hello first")
            return
        peer.heard_at = now
        self._handlers[op](peer, fields, payload, now)

    def is_idle(self, identity: bytes) -> bool:
        """Whether a generator has delivered all that was leased to it."""
        peer = self._s.peers.get(identity)
        return peer is not None and not self._s.ledger.load_of(peer.name)

    def turn(self, now: float) -> None:
        """Leases that ended, generators that are gone, groups to hand out."""
        ledger = self._s.ledger
        ledger.draining = self._s.directory.desired() == "draining"
        ledger.expire(now)
        if now >= self._look_at:
            self._look_at = now + 1.0
            self._forget_the_lost(now)
        self._tell_cancelled()
        self._lease_out(now)

    def _tell_cancelled(self) -> None:
        """Before anything is leased: a generator may get the same group again."""
        ledger = self._s.ledger
        for generator, (group, attempt), reason in ledger.cancels:
            holder = self._s.peers.named(generator)
            if holder is not None:
                self._s.send(holder.identity, "cancel", group=group, attempt=attempt, reason=reason)
        ledger.cancels.clear()

    # ------------------------------------------------------------ messages
    def _hello(self, identity: bytes, now: float, *, run: str, name: str, incarnation: str, version: int) -> None:
        s = self._s
        if run != s.config.run.id:
            self._refuse(identity, "hello", "other_run", f"this is run {s.config.run.id}, not {run[:100]}")
            return
        if s.peers.is_superseded(name, incarnation):
            self._refuse(identity, "hello", "stale_incarnation", f"a later process has the name {name[:100]}")
            return
        known = s.peers.get(identity) is not None
        peer, replaced = s.peers.greet(identity, name, incarnation, now)
        if replaced is not None:
            self._refuse(replaced.identity, "hello", "stale_incarnation", f"a later process has the name {name[:100]}")
        s.ledger.forget_generator(name, "generator_restarted", but=incarnation)
        peer.version = version
        counters = s.ledger.counters
        s.send(identity, "welcome", version=counters.version, floor=counters.floor)
        if not known:
            s.log.info("generator %s is here, holding version %d", name, version)
            for attempt in s.ledger.leases_of(name):
                self._send_lease(peer, attempt)

    def _heartbeat(self, peer: Peer, fields: Fields, payload: list[bytes], now: float) -> None:
        progress = parse.int_lists(fields["progress"], 3, "heartbeat.progress")
        spans = [parse.span(x, "heartbeat.sampling") for x in fields["sampling"]]
        peer.version, peer.capacity = fields["version"], fields["capacity"]
        peer.report(parse.numbers(fields["stats"]), now)
        if "until" in peer.stats:
            self._s.overlap.sampled(peer.name, spans, peer.stats["until"])
        for group, attempt, num_tokens in progress:
            if not self._s.ledger.progress(peer.name, (group, attempt), num_tokens, now):
                self._s.send(peer.identity, "cancel", group=group, attempt=attempt, reason="not_leased")

    def _sample(self, peer: Peer, fields: Fields, payload: list[bytes], now: float) -> None:
        s = self._s
        group, attempt, index = fields["group"], fields["attempt"], fields["index"]
        try:
            spans = self._checked(fields, payload)
            if fields["fault"] is not None:
                fields["fault"] = parse.word(fields["fault"])
            verdict = s.ledger.commit(peer.name, fields, now, len(payload[0]))
        except (WireError, LedgerError) as e:
            reason = e.reason if isinstance(e, WireError) else str(e).split(":")[0]
            s.counted["refused"] += 1
            self._refuse(peer.identity, "sample", reason, f"{group}/{attempt}/{index}: {e}")
            if s.ledger.give_back(peer.name, (group, attempt), reason, retry=True):
                s.send(peer.identity, "cancel", group=group, attempt=attempt, reason=reason)
            else:
                s.acknowledge(peer.identity, (group, attempt, index))
            return
        s.counted[verdict] += 1
        if verdict == "stored":
            s.keep(NewSample(fields, payload[0], peer.name, spans))
            s.counted["faulty"] += fields["fault"] is not None
        s.acknowledge(peer.identity, (group, attempt, index))

    def _checked(self, fields: Fields, payload: list[bytes]) -> Spans:
        if len(payload) != 1:
            raise WireError("bad_payload", f"{len(payload)} frames instead of one")
        spans, temperature = check_sample(fields, payload[0], vocab_size=self._s.vocab_size)
        attempt = self._s.ledger.live.get((fields["group"], fields["attempt"]))
        if attempt is not None and attempt.lane == "train":
            greedy = fields["index"] == self._s.ledger.rules.greedy_index
            if temperature is None or not (temperature == 0 if greedy else temperature > 0):
                kind = "the greedy sample of a group" if greedy else "a training rollout"
                raise WireError("bad_sampling", f"temperature {temperature} in {kind}")
        return spans

    def _give_back(self, peer: Peer, fields: Fields, payload: list[bytes], now: float) -> None:
        reason = parse.word(fields["reason"])
        self._s.ledger.give_back(peer.name, (fields["group"], fields["attempt"]), reason, retry=fields["retry"])

    def _bye(self, peer: Peer, fields: Fields, payload: list[bytes], now: float) -> None:
        self._forget(peer, "generator_left")

    def _refuse(self, identity: bytes, re: str, reason: str, detail: str) -> None:
        self._s.refused[reason] += 1
        self._s.send(identity, "refused", re=re, reason=reason, detail=detail[:500])

    # ------------------------------------------------------------ generators that are gone
    def _forget_the_lost(self, now: float) -> None:
        """Those silent for too long; and after a restart of the broker, those that do not come back."""
        s = self._s
        for peer in list(s.peers):
            silent_s = now - peer.heard_at
            if silent_s > s.ledger.rules.lease_timeout_s or (
                silent_s > LOST_S and s.directory.entry(peer.name) is None
            ):
                self._forget(peer, "generator_lost")
        if now - self._began > LOST_S:
            for name in s.ledger.holders():
                if s.peers.named(name) is None and s.directory.entry(name) is None:
                    s.ledger.forget_generator(name, "generator_lost")

    def _forget(self, peer: Peer, reason: str) -> None:
        num = self._s.ledger.forget_generator(peer.name, reason)
        self._s.peers.remove(peer)
        self._s.overlap.forget(peer.name)
        self._s.log.info("%s: %s, %d groups go to others", peer.name, reason.replace("_", " "), num)

    # ------------------------------------------------------------ leases
    def _lease_out(self, now: float) -> None:
        """One group to each in turn, until nobody may have another."""
        asking = self._s.peers.in_turn()
        while asking:
            asking = [peer for peer in asking if self._lease_to(peer, now)]

    def _lease_to(self, peer: Peer, now: float) -> bool:
        ledger = self._s.ledger
        load = ledger.load_of(peer.name)
        room = peer.capacity - load
        if peer.capacity <= 0 or (load and room < ledger.next_size(peer.version)):
            self._wait(peer, None, now)
            return False
        reason = self._obstacle(peer, now)
        attempt = None if reason else ledger.lease(peer.name, peer.incarnation, peer.version, now)
        if attempt is None:
            self._wait(peer, reason or ledger.refusal(peer.version), now)
            return False
        self._wait(peer, None, now)
        self._send_lease(peer, attempt)
        return True

    def _obstacle(self, peer: Peer, now: float) -> str | None:
        desired = "stopped" if self._s.closing else self._s.directory.desired()
        if desired != "running":
            return f"the run is {desired}"
        if self._s.directory.entry(peer.name) is None:
            return f"generator {peer.name} has no registry entry"
        if now - peer.heard_at > QUIET_BEATS * self._s.config.rollout.heartbeat_s:
            return f"silent: no word from generator {peer.name}"
        return None

    def _wait(self, peer: Peer, reason: str | None, now: float) -> None:
        """Note why a generator waits; tell it when the kind of reason changes."""
        kind, before = (reason or "").split(":")[0], (peer.waits_for or "").split(":")[0]
        peer.waits_for = reason
        if kind != before:
            peer.waits_since = now
            if reason:
                self._s.send(peer.identity, "wait", reason=reason)

    def _send_lease(self, peer: Peer, attempt: Attempt) -> None:
        row = self._s.prompts[attempt.lane].row(attempt.prompt)
        missing = [i for i in range(attempt.size) if i not in attempt.samples]
        self._s.send(
            peer.identity, "lease", pack(row), group=attempt.group, attempt=attempt.attempt, indices=missing,
            lane=attempt.lane, limit_s=self._s.ledger.rules.lease_limit_s,
        )  # fmt: skip
