"""The learner's line to the broker: claims, payloads, acknowledgements. Blocking; one thread uses it.

Consumes batches; produces acknowledgements. Waits, by name, for the broker's answer; while a claim
waits for groups the broker says about once a second what it waits for. Every request may be
repeated, so after a silence (the broker was restarted) it is simply sent again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

from common.errors import (
    DeadlineError,
    FencedError,
    LedgerError,
    LeewayError,
    NoSignalError,
    RolledBackError,
    Stopped,
)
from common.sockets import Dealer
from common.wire import LEARNER_OPS, Sample, decode, decode_sample, encode, unpack
from learner.plain import between_ranks

RESEND_S = 2.0  # silence after which a request is sent again
POLL_S = 0.2  # how soon a stop is seen
AFTER_STOP_S = 5.0  # time for what belongs to the last step once ``stop`` is set; a claim ends at once
SAMPLES_PER_FETCH, TOKENS_PER_FETCH = 1024, 1 << 20  # of one request, whichever is reached first
_ERRORS: dict[str, type[LeewayError]] = {
    "fenced": FencedError, "no_signal": NoSignalError, "rolled_back": RolledBackError,
}  # fmt: skip


@between_ranks
@dataclass(frozen=True)
class Attached:
    epoch: int
    version: int  # v
    step: int  # last acknowledged step
    floor: int
    checkpoint: int  # step of the newest valid checkpoint; -1: none
    abandoned: tuple[tuple[int, int], ...] = ()  # (first, last) step of each run that a rollback gave up


@between_ranks
@dataclass(frozen=True)
class Group:
    group: int
    attempt: int
    headers: tuple[dict[str, Any], ...]  # of its samples, in order of index; see `sample` in common/wire.py


@between_ranks
@dataclass(frozen=True)
class Claim:
    """A batch."""

    step: int
    version: int  # at which it is trained
    limit: int  # staleness limit in force at the claim
    short: bool  # the data ended: fewer groups than asked for
    groups: tuple[Group, ...]  # in order of deadline
    settings: dict[str, Any] | None = None  # replay: the recorded live settings, in place of those of now
    skipped: bool = False  # replay: the recorded step was skipped, so there is nothing to train

    @property
    def oldest(self) -> int:
        """The oldest version among its tokens."""
        return min(h["oldest"] for g in self.groups for h in g.headers)


@between_ranks
@dataclass(frozen=True)
class StepRow:
    """An acknowledged step, to be redone."""

    step: int
    epoch: int
    version: int
    applied: bool  # False: it was skipped, its claim has no groups
    reason: str
    settings: dict[str, Any]
    digest: str
    claim: Claim
    restored: int | None = None  # it is a rollback, to the checkpoint of this step


@between_ranks
@dataclass(frozen=True)
class Stepped:
    version: int
    checkpoint_wanted: bool
    stats: dict[str, Any]  # see broker/status.py


class Feed:
    """A connection to the broker of a run.

    All methods raise DeadlineError (naming the request) if the broker stays silent for ``timeout_s``,
    Stopped once ``stop`` is set (what ends a step still gets some seconds), FencedError if a later
    learner has taken the run, LedgerError if the ledger refuses the request.
    """

    def __init__(
        self, address: str | Callable[[], str | None], *, run_id: str, name: str, stop: Event, timeout_s: float = 60.0
    ) -> None:
        """``address``: of the broker, or a function that looks it up (it is asked again after a silence)."""
        self._lookup = address if callable(address) else lambda: address
        self._run_id, self._name, self.stop, self._timeout_s = run_id, name, stop, timeout_s
        self._incarnation = uuid.uuid4().hex
        self._dealer: Dealer | None = None
        self._address: str | None = None
        self._num_dials = 0
        self._last_id = 0
        self.epoch = 0

    def another(self) -> Feed:
        """A second connection of the attached learner, for another thread, with a `stop` of its own."""
        feed = Feed(self._lookup, run_id=self._run_id, name=self._name, stop=Event(), timeout_s=self._timeout_s)
        feed.epoch = self.epoch
        return feed

    def close(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def attach(self) -> Attached:
        """Take the run; learners before this one are fenced off from now on."""
        _, f, _ = self._ask("attach", run=self._run_id, name=self._name, incarnation=self._incarnation)
        abandoned = tuple((first, last) for first, last in f["abandoned"])
        attached = Attached(f["epoch"], f["version"], f["step"], f["floor"], f["checkpoint"], abandoned)
        self.epoch = attached.epoch
        return attached

    def claim(
        self, *, step: int, version: int, num_groups: int, on_wait: Callable[[str], None] | None = None
    ) -> Claim | None:
        """The batch of ``step``, to be trained at ``version``; None: the data ended.

        While step s is trained at version v, that of step s + 1 at version v + 1 may be claimed too.

        Waits for as long as the broker says that it waits; ``on_wait`` is told why, about once a second.
        """
        op, f, payload = self._ask(
            "claim", on_wait=on_wait, epoch=self.epoch, step=step, version=version, num_groups=num_groups
        )
        if op == "ended":
            return None
        return Claim(f["step"], f["version"], f["limit"], f["short"], _groups(payload))

    def see_claim(self, *, step: int) -> Claim:
        """The batch of ``step``, once a connection of this learner has claimed it: for the others, which fetch
        their shares of it."""
        _, f, payload = self._ask("see_claim", epoch=self.epoch, step=step)
        return Claim(f["step"], f["version"], f["limit"], f["short"], _groups(payload))

    def fetch(self, claim: Claim) -> list[Sample]:
        """The samples of a batch, checked: groups in order, in each the samples by index.

        Raises:
            WireError: a payload that is not what its header says.
            LedgerError: a payload that was removed.
        """
        samples: list[Sample] = []
        for part in _portions([h for g in claim.groups for h in g.headers]):
            keys = [[h["group"], h["attempt"], h["index"]] for h in part]
            _, _, payload = self._ask("fetch", epoch=self.epoch, keys=keys)
            samples += [decode_sample(h, p) for h, p in zip(part, payload, strict=True)]
        return samples

    def acknowledge(
        self,
        *,
        step: int,
        applied: bool,
        reason: str,
        settings: dict[str, Any],
        digest: str,
        optimizer_span: list[float],
    ) -> Stepped:
        """All ranks applied the step (or skipped it); on return this is on disk."""
        _, f, _ = self._ask(
            "ack_step", epoch=self.epoch, step=step, applied=applied, reason=reason, settings=settings, digest=digest,
            optimizer_span=list(optimizer_span),
        )  # fmt: skip
        return Stepped(f["version"], f["checkpoint_wanted"], f["stats"])

    def give_back(self, *, step: int, reason: str) -> None:
        """The claimed batch is not trained; its groups are ready again if they are young enough."""
        self._ask("return", epoch=self.epoch, step=step, reason=reason)

    def roll_back(self, *, step: int, who: str, lr_factor: float) -> None:
        """The run is to go on from the checkpoint of ``step``, with so much of the learning rates.

        This learner has lost its epoch then: it has to end. RolledBackError: it was rolled back already.
        """
        self._ask("rollback", run=self._run_id, epoch=self.epoch, step=step, who=who, lr_factor=lr_factor)

    def checkpoint_valid(self, *, step: int, path: str) -> None:
        """The checkpoint of an acknowledged step is complete on disk."""
        self._ask("checkpoint", epoch=self.epoch, step=step, path=str(path))

    def rows(self, *, after: int) -> list[StepRow]:
        """The acknowledged steps beyond ``after``, in order; their claims can be fetched."""
        rows: list[StepRow] = []
        while True:
            _, _, payload = self._ask("row", epoch=self.epoch, after=rows[-1].step if rows else after)
            if not payload:
                return rows
            m = unpack(payload[0])
            claim = Claim(m["step"], m["version"], m["limit"], False, _groups(payload[1:]))
            rows.append(
                StepRow(
                    step=m["step"], epoch=m["epoch"], version=m["version"], applied=m["applied"], reason=m["reason"],
                    settings=m["settings"], digest=m["digest"], claim=claim, restored=m["restored"],
                )
            )  # fmt: skip

    def validate(self, *, step: int, version: int) -> None:
        """Have the held-out prompts sampled by generators that hold at least ``version``."""
        self._ask("validate", epoch=self.epoch, step=step, version=version)

    def validations(self) -> list[dict[str, Any]]:
        """Complete validations so far: ``{step, version, score, num_samples, num_dropped}``; a score of None: no
        held-out prompt could be scored."""
        _, f, _ = self._ask("validations", epoch=self.epoch)
        return list(f["results"])

    def validations_asked(self) -> list[int]:
        """The steps that a validation was asked for, by this learner or one before it."""
        _, f, _ = self._ask("validations", epoch=self.epoch)
        return list(f["asked"])

    def status(self) -> dict[str, Any]:
        """See broker/status.py. Needs no ``attach``."""
        _, f, _ = self._ask("status")
        return dict(f["status"])

    # ------------------------------------------------------------ requests
    def _ask(
        self, op: str, *, on_wait: Callable[[str], None] | None = None, **fields: Any
    ) -> tuple[str, dict[str, Any], list[bytes]]:
        """Send a request, again after each silence, until its answer comes."""
        self._last_id += 1
        frames = encode(op, id=self._last_id, **fields)
        what = f"the broker's answer to {op}" + (f" of step {fields['step']}" if "step" in fields else "")
        heard_at, sent_at, stopped_at = time.monotonic(), float("-inf"), float("inf")
        while True:
            now = time.monotonic()
            if self.stop.is_set():
                stopped_at = min(stopped_at, now)
                if op in ("claim", "see_claim") or now - stopped_at > AFTER_STOP_S:
                    raise Stopped(what)
            if now - heard_at > self._timeout_s:
                raise DeadlineError(
                    f"{what} ({self._address or 'not in the registry'})",
                    now - heard_at,
                    "is the broker there? see its log",
                )
            if now - max(sent_at, heard_at) > RESEND_S or sent_at < 0:
                self._dial(again=sent_at > 0)
                if self._dealer is not None:
                    self._dealer.send(frames)
                sent_at = now
            answer = self._receive(POLL_S)
            if answer is not None and answer[0] == "refused":
                raise LedgerError(f"{what} ({self._address}): {answer[1]['reason']}: {answer[1]['detail']}")
            if answer is None or answer[1].get("id") != self._last_id:
                continue  # nothing, or the late answer to a request that was sent twice
            heard_at = time.monotonic()
            if answer[0] != "waiting":
                return _checked(*answer)
            if on_wait is not None:
                on_wait(answer[1]["reason"])

    def _dial(self, *, again: bool) -> None:
        """Connect where the broker is now. A restarted broker does not know our connection: make another."""
        address = self._lookup()
        if address is None or (address == self._address and not again):
            return
        self.close()
        self._num_dials += 1
        identity = f"{self._name}/{self._incarnation}/{self._num_dials}".encode()
        self._dealer, self._address = Dealer(address, identity), address

    def _receive(self, timeout_s: float) -> tuple[str, dict[str, Any], list[bytes]] | None:
        if self._dealer is None:
            self.stop.wait(timeout_s)
            return None
        frames = self._dealer.receive(timeout_s)
        return None if frames is None else decode(frames, LEARNER_OPS)


def _checked(op: str, fields: dict[str, Any], payload: list[bytes]) -> tuple[str, dict[str, Any], list[bytes]]:
    if op == "error":
        raise _ERRORS.get(fields["kind"], LedgerError)(fields["detail"])
    return op, fields, payload


def _portions(headers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Sample headers in runs of a bounded number of samples and tokens."""
    portions: list[list[dict[str, Any]]] = []
    num_tokens = 0
    for header in headers:
        num_tokens += header["num_tokens"]
        if not portions or len(portions[-1]) >= SAMPLES_PER_FETCH or num_tokens > TOKENS_PER_FETCH:
            portions.append([])
            num_tokens = header["num_tokens"]
        portions[-1].append(header)
    return portions


def _groups(payload: list[bytes]) -> tuple[Group, ...]:
    return tuple(Group(g["group"], g["attempt"], tuple(g["samples"])) for frame in payload for g in unpack(frame))
