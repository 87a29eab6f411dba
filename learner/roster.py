"""Who holds which version, and what to send to whom next: a pure state machine.

No sockets, threads or clock of its own: the caller hands in messages and the time, and carries
out the actions that come back. One rule covers publishing, joining late, coming back and a
restarted learner: *a connected engine that is idle and holds less than the newest version is
sent that version*. Each engine has its own transfer; none waits for another.

    hello ─► idle ─► preparing ─► sending ─► swapping ─► idle (holds the version)
                         └───────────┴───────────┴─────► resting (failed) ─► idle
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REST_S = 0.25  # after a failure a member rests this long, doubled each time, at most the timeout
MAX_GROUP_FAILURES = 3  # who failed so often in a row by the usual transport gets snapshots until it joins anew
MAX_DISPROOFS = 3  # an engine that computes something else after so many loads is sent away
MAX_SENDING = 10  # a whole transfer may take so many times the timeout, which is the limit of each bucket
TRANSFER_STATES = ("preparing", "sending", "swapping")


@dataclass(frozen=True)
class Send:
    """Send this message to a peer."""

    peer: bytes
    op: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Prepare:
    """Send PREPARE, with the manifest of ``version``, to a member."""

    peer: bytes
    number: int
    version: int
    num_workers: int
    transport: str


@dataclass(frozen=True)
class Start:
    """The member is ready: make the group and send the buckets (then call ``sent`` or ``torn``)."""

    number: int
    name: str
    version: int
    num_workers: int
    prove: bool  # the load; its canary is made while the buckets are sent


@dataclass(frozen=True)
class Swap:
    """Send SWAP to a member, with the canary of ``version`` if the load is to be proven."""

    peer: bytes
    number: int
    version: int
    prove: bool


@dataclass(frozen=True)
class End:
    """The transfer needs its group and its weights no longer; ``staged`` tells how it ended."""

    number: int
    staged: bool


@dataclass(frozen=True)
class Note:
    """Something a person may want to read; ``fault`` if it is one."""

    text: str
    fault: bool = False


Action = Send | Prepare | Start | Swap | End | Note


@dataclass
class Member:
    """One connected engine."""

    name: str
    peer: bytes
    incarnation: str
    num_workers: int
    version: int  # that it holds
    heard: float  # when it was last heard of, seconds
    state: str = "idle"
    number: int = -1  # of its transfer
    sending: int = -1  # version of its transfer
    deadline: float = 0.0  # of its state
    failures: int = 0  # in a row
    pause_s: float = 0.0  # of its last swap
    started: float = 0.0  # when its transfer began
    prove: bool = False  # whether the load of its transfer is to be proven
    proven: int | None = None  # version of the last proof; None: the next load is to be proven
    disproofs: int = 0  # in a row
    transport: str = ""  # of its transfer
    group_failures: int = 0  # in a row, by the usual transport


@dataclass
class Figures:
    """Counts since the start, and the last transfer's times."""

    transfers: int = 0
    failures: int = 0
    transfer_s: float = 0.0  # PREPARE to HELD
    pause_s: float = 0.0
    difference: float = -1.0  # of the last proof


@dataclass
class Roster:
    """All members of one learner, and the version they shall hold."""

    run_id: str
    epoch: int
    timeout_s: float
    transport: str = "gloo"  # the usual one
    snapshot: str = "snapshot"  # the way of newcomers and of those whom the usual one has failed; or "file"
    version: int = -1  # newest one kept for sending
    digests: dict[int, int] = field(default_factory=dict)  # by version: what an engine must answer that has staged it
    ready: bool = True  # false while the newest version is being replaced in memory
    members: dict[str, Member] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    fenced_by: int | None = None  # a higher epoch than ours that a member has met
    next_number: int = 0
    proves: bool = False  # whether there are canaries
    canary_every: int = 0  # versions between two proofs; 0: only when one is due for another reason

    # ------------------------------------------------------------ messages of engines
    def receive(self, peer: bytes, op: str, fields: dict[str, Any], now: float) -> list[Action]:
        """One message, as ``CONTROL_OPS`` has it."""
        if op == "hello":
            return self._hello(peer, fields, now)
        member = next((m for m in self.members.values() if m.peer == peer), None)
        if member is None:
            return [Send(peer, "refused", {"re": op, "reason": "unknown_member", "detail": "say hello first"})]
        member.heard = now
        return getattr(self, f"_{op}", self._unexpected)(member, fields, now)  # type: ignore[no-any-return]

    def _hello(self, peer: bytes, fields: dict[str, Any], now: float) -> list[Action]:
        if fields["run"] != self.run_id:
            detail = f"this is run {self.run_id}"
            return [Send(peer, "refused", {"re": "hello", "reason": "other_run", "detail": detail})]
        name = fields["name"]
        actions: list[Action] = []
        known = self.members.get(name)
        if known is not None and (known.peer != peer or known.incarnation != fields["incarnation"]):
            actions += self._give_up(known, "it connected anew", now)
            known = None
        if known is None:
            self.members[name] = Member(
                name, peer, fields["incarnation"], fields["num_workers"], fields["version"], now
            )
            actions.append(Note(f"{name} joined, holds version {fields['version']}"))
        else:
            known.heard, known.version = now, max(known.version, fields["version"])
        return [*actions, self._welcome(peer), *self.advance(now)]

    def _welcome(self, peer: bytes) -> Send:
        return Send(peer, "welcome", {"epoch": self.epoch, "timeout_s": self.timeout_s})

    def _beat(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        m.version = max(m.version, fields["version"])
        return [self._welcome(m.peer), *self.advance(now)]

    def _prepared(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        if not self._is_at(m, fields, "preparing"):
            return []
        m.state, m.deadline = "sending", now + self.timeout_s * MAX_SENDING
        return [Start(m.number, m.name, m.sending, m.num_workers, m.prove)]

    def _staged(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        if not self._is_at(m, fields, "sending"):
            return []
        if fields["digest"] != (wanted := self.digests.get(m.sending)):
            return self._fail(m, f"it staged something else (digest {fields['digest']}, not {wanted})", now)
        # A proof waits for its turn in the engine, at most timeout_s.
        m.state, m.deadline = "swapping", now + self.timeout_s * (2 if m.prove else 1)
        return [Swap(m.peer, m.number, m.sending, m.prove), End(m.number, staged=True)]

    def _held(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        m.version = max(m.version, fields["version"])
        if not self._is_at(m, fields, "swapping"):
            return self.advance(now)
        m.state, m.failures, m.pause_s = "idle", 0, fields["pause_s"]
        if m.transport == self.transport:
            m.group_failures = 0
        if m.prove:
            m.proven, m.disproofs, self.figures.difference = m.sending, 0, fields["difference"]
        self.figures.transfers += 1
        self.figures.transfer_s, self.figures.pause_s = now - m.started, m.pause_s
        return self.advance(now)

    def _disproved(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        """It computes something else than what was sent: again, or away with it."""
        m.version, m.proven, m.disproofs = -1, None, m.disproofs + 1
        self.figures.difference = fields["difference"]
        if m.disproofs < MAX_DISPROOFS:
            if self._is_at(m, fields, "swapping"):
                return self._fail(m, fields["reason"], now)
            return [Note(f"{m.name} says: {fields['reason']}", fault=True), *self.advance(now)]
        detail = f"after {m.disproofs} loads: {fields['reason']}"
        away = Send(m.peer, "refused", {"re": "held", "reason": "disproved", "detail": detail})
        return [*self._give_up(m, fields["reason"], now), away, Note(f"{m.name} is sent away {detail}", fault=True)]

    def _failed(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        m.version = fields["version"]  # lower than before, if the load itself was torn
        if fields["number"] != m.number:
            return []
        if m.state not in TRANSFER_STATES:  # its connection broke first; this is why
            return [Note(f"{m.name} says: {fields['reason']}", fault=True)]
        return self._fail(m, f"it says: {fields['reason']}", now)

    def _fenced(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        self.fenced_by = max(fields["epoch"], self.fenced_by or 0)
        return [Note(f"{m.name} has met a learner of epoch {fields['epoch']}; this one is of {self.epoch}", fault=True)]

    def _leave(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        return [*self._give_up(m, "it left", now), Note(f"{m.name} left")]

    def _unexpected(self, m: Member, fields: dict[str, Any], now: float) -> list[Action]:
        return [Send(m.peer, "refused", {"re": "?", "reason": "unexpected", "detail": "not for a learner"})]

    @staticmethod
    def _is_at(m: Member, fields: dict[str, Any], state: str) -> bool:
        """Whether a message is about the member's present transfer; late ones are not."""
        return m.state == state and fields["number"] == m.number

    # ------------------------------------------------------------ events of this process
    def published(self, version: int, now: float) -> list[Action]:
        """``version`` is in memory, or on its way there, to be sent to all that hold less."""
        self.version, self.ready = version, True
        return self.advance(now)

    def sealed(self, version: int, digest: int) -> list[Action]:
        """The digest of a version is known; engines have it only after that."""
        in_use = {version, *(m.sending for m in self.members.values())}
        self.digests = {v: d for v, d in {**self.digests, version: digest}.items() if v in in_use or v > version}
        return []

    def sent(self, number: int, now: float) -> list[Action]:
        """All buckets are on their way; the engine must have them staged soon."""
        for m in self.members.values():
            if m.number == number and m.state == "sending":
                m.deadline = min(m.deadline, now + self.timeout_s)
        return []

    def make_room(self, now: float) -> list[Action]:
        """Memory is needed for a newer version: end the transfers of the oldest one that is still being sent."""
        holding = [m for m in self.members.values() if m.state in ("preparing", "sending") and m.sending < self.version]
        oldest = min((m.sending for m in holding), default=-1)
        slow = [m for m in holding if m.sending == oldest]
        return [a for m in slow for a in self._fail(m, f"too slow, after {now - m.started:.1f} s newer ones wait", now)]

    def torn(self, number: int, reason: str, now: float) -> list[Action]:
        """The group broke or timed out."""
        for m in self.members.values():
            if m.number == number and m.state == "sending":
                return self._fail(m, reason, now)
        return []

    def gone(self, peer: bytes, now: float) -> list[Action]:
        """The socket says that nobody is there any more."""
        for m in list(self.members.values()):
            if m.peer == peer:
                return [
                    *self._give_up(m, "its connection is gone", now),
                    Note(f"{m.name}: its connection is gone", fault=True),
                ]
        return []

    def tick(self, now: float) -> list[Action]:
        """What has become due: deadlines, silence, rests."""
        actions: list[Action] = []
        for m in list(self.members.values()):
            if now - m.heard > self.timeout_s:
                what = f"silent for {now - m.heard:.1f} s; left out until it is heard of again"
                actions += [*self._give_up(m, "it fell silent", now), Note(f"{m.name}: {what}", fault=True)]
            elif m.state in TRANSFER_STATES and now >= m.deadline:
                waited = {"preparing": "PREPARED", "sending": "STAGED", "swapping": "HELD"}[m.state]
                actions += self._fail(m, f"no {waited} within {now - m.started:.3g} s", now)
        return [*actions, *self.advance(now)]

    def next_due(self) -> float:
        """When ``tick`` is needed again, if nothing else happens."""
        due = [m.heard + self.timeout_s for m in self.members.values()]
        due += [m.deadline for m in self.members.values() if m.state != "idle"]
        return min(due, default=float("inf"))

    # ------------------------------------------------------------ the rule
    def advance(self, now: float) -> list[Action]:
        """Begin a transfer to each idle member that holds less than the newest version."""
        actions: list[Action] = []
        for m in self.members.values():
            if m.state == "resting" and now >= m.deadline:
                m.state = "idle"
            if not self.ready or self.fenced_by is not None:
                continue
            if m.state == "idle" and m.version < self.version:
                m.number, self.next_number = self.next_number, self.next_number + 1
                m.state, m.sending = "preparing", self.version
                m.started, m.deadline = now, now + self.timeout_s
                m.prove = self.proves and self._is_due(m)
                m.transport = self._transport_for(m)
                actions.append(Prepare(m.peer, m.number, m.sending, m.num_workers, m.transport))
        return actions

    def _transport_for(self, m: Member) -> str:
        """A snapshot for newcomers, after a failure, and for whom the usual transport never reaches.

        Where snapshots are files, the one after a file that came to nothing goes over the socket.
        """
        never = m.group_failures >= MAX_GROUP_FAILURES
        if not (m.version < 0 or m.failures > 0 or never):
            return self.transport
        no_file = (m.failures > 0 and m.transport == "file") or (never and self.transport == "file")
        return "snapshot" if no_file else self.snapshot

    def _is_due(self, m: Member) -> bool:
        """A proof: at its first load here, after each fault, and every ``canary_every`` versions."""
        return m.proven is None or (self.canary_every > 0 and m.sending - m.proven >= self.canary_every)

    def _fail(self, m: Member, reason: str, now: float) -> list[Action]:
        """End a member's transfer; it rests a little and is then tried again."""
        actions: list[Action] = [
            Note(f"{m.name}: version {m.sending} not delivered: {reason}", fault=True),
            Send(m.peer, "abort", {"number": m.number, "reason": reason}),
            End(m.number, staged=False),
        ]
        self.figures.failures += 1
        m.state, m.proven = "resting", None
        m.deadline = now + min(REST_S * 2**m.failures, self.timeout_s)
        m.failures += 1
        m.group_failures += m.transport == self.transport
        return actions

    def _give_up(self, m: Member, reason: str, now: float) -> list[Action]:
        """Forget a member; what runs for it ends."""
        actions = self._fail(m, reason, now) if m.state in TRANSFER_STATES else []
        del self.members[m.name]
        return actions
