"""The broker's side of the learner: attaching, claims, payloads, acknowledgements, validations, status."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker import parse
from broker.book import ROLLED_BACK
from broker.records import Claim, Drops
from broker.service import Parked, Service
from broker.status import stats, status, why_not_ready
from common.errors import FencedError, LedgerError, NoSignalError, RolledBackError, WireError
from common.failpoints import failpoint
from common.wire import pack

OPS = ("attach", "claim", "see_claim", "fetch", "ack_step", "return", "checkpoint", "row", "validate", "validations",
       "status", "rollback")  # fmt: skip
SAMPLES_PER_FRAME = 4096  # sample headers in one frame of a claim
KEYS_PER_FETCH = 4000
MAX_WATCHERS = 4096
TELL_S = 1.0
Fields = dict[str, Any]


@dataclass
class Watcher:
    """A connection that waits for the claim of a step."""

    id: int
    epoch: int
    step: int
    told_at: float


class LearnerDesk:
    """Consumes the requests ``OPS``; each is answered once, a claim when it can be."""

    def __init__(self, service: Service) -> None:
        self._s = service
        self._watchers: dict[bytes, Watcher] = {}  # by connection
        self._handlers: dict[str, Callable[..., None]] = {
            "attach": self._attach,
            "claim": self._claim,
            "see_claim": self._see_claim,
            "fetch": self._fetch,
            "ack_step": self._ack_step,
            "return": self._return,
            "checkpoint": self._checkpoint,
            "row": self._row,
            "validate": self._validate,
            "validations": self._validations,
            "status": self._status,
            "rollback": self._rollback,
        }

    def handle(self, peer: bytes, op: str, fields: Fields) -> None:
        """Raises WireError for what the schema leaves open and is wrong."""
        if op not in ("status", "rollback"):  # which are not the learner's
            self._s.learner_heard_at = self._s.clock()
        try:
            self._handlers[op](peer, **fields)
        except (LedgerError, FencedError) as e:
            self._error(peer, fields["id"], e)

    def turn(self, now: float) -> bool:
        """Try the claim that waits; say about once a second why it has to wait longer. True: it waits no more."""
        made = self._try_claim(now)
        self._tell_watchers(now)
        return made

    def _try_claim(self, now: float) -> bool:
        parked = self._s.parked
        if parked is None:
            return False
        try:
            claim = self._sound_claim(parked)
        except (LedgerError, FencedError) as e:
            self._s.parked = None
            self._error(parked.peer, parked.id, e)
            return True
        if isinstance(claim, str):
            if now - parked.told_at >= TELL_S:
                parked.told_at, parked.reason = now, why_not_ready(self._s, claim)
                self._s.send(parked.peer, "waiting", id=parked.id, reason=parked.reason)
            return False
        self._s.parked = None
        if claim is None:
            self._s.send(parked.peer, "ended", id=parked.id, reason="the data ended")
        else:
            failpoint("broker.during_claim")
            now, sent = self._s.clock(), self._s.handed_out_at
            self._s.handed_out_at = {c.step: sent.get(c.step, now) for c in self._s.ledger.claims}
            self._send_claim(parked.peer, parked.id, claim)
        return True

    def _tell_watchers(self, now: float) -> None:
        """The claims that are there now, to those that wait for them."""
        s = self._s
        for peer, w in list(self._watchers.items()):
            claim = next((c for c in s.ledger.claims if c.step == w.step), None)
            try:
                s.ledger.fence(w.epoch)
                if w.step <= s.ledger.counters.step:
                    raise LedgerError(f"step {w.step} is over: the last one is {s.ledger.counters.step}")
            except (LedgerError, FencedError) as e:
                del self._watchers[peer]
                self._error(peer, w.id, e)
                continue
            if claim is not None:
                del self._watchers[peer]
                self._send_claim(peer, w.id, claim)
            elif now - w.told_at >= TELL_S:
                w.told_at = now
                s.send(peer, "waiting", id=w.id, reason=f"step {w.step} is not claimed yet")

    # ------------------------------------------------------------ requests
    def _attach(self, peer: bytes, *, id: int, run: str, name: str, incarnation: str) -> None:
        s = self._s
        self._refuse_other_run(run)
        before = s.ledger.counters.epoch
        epoch = s.ledger.attach(name, incarnation)
        if epoch != before:
            s.parked = None
            s.fetched.clear()
            s.log.info("learner %s is here: epoch %d, step %d", name, epoch, s.ledger.counters.step)
        c = s.ledger.counters
        s.send(
            peer, "attached", id=id, epoch=epoch, version=c.version, step=c.step, floor=c.floor,
            checkpoint=s.ledger.checkpoint, abandoned=[list(run) for run in s.ledger.abandoned],
        )  # fmt: skip

    def _refuse_other_run(self, run: str) -> None:
        if run != self._s.config.run.id:
            raise LedgerError(f"this is the broker of run {self._s.config.run.id}, not of {run[:100]}")

    def _claim(self, peer: bytes, *, id: int, epoch: int, step: int, version: int, num_groups: int) -> None:
        if num_groups < 1:
            raise LedgerError(f"claim of {num_groups} groups refused: at least one")
        self._s.ledger.fence(epoch)
        now = self._s.clock()
        before = self._s.parked
        since = before.since if before is not None and before.step == step else now
        self._s.parked = Parked(peer, id, epoch, step, version, num_groups, since)

    def _see_claim(self, peer: bytes, *, id: int, epoch: int, step: int) -> None:
        self._s.ledger.fence(epoch)
        if len(self._watchers) >= MAX_WATCHERS and peer not in self._watchers:
            raise LedgerError(f"more than {MAX_WATCHERS} connections wait for a claim")
        self._watchers[peer] = Watcher(id, epoch, step, self._s.clock())

    def _fetch(self, peer: bytes, *, id: int, epoch: int, keys: list[Any]) -> None:
        self._s.ledger.fence(epoch)
        wanted = [(g, a, i) for g, a, i in parse.int_lists(keys, 3, "fetch.keys")]
        if len(wanted) > KEYS_PER_FETCH:
            raise LedgerError(f"fetch of {len(wanted)} samples refused: at most {KEYS_PER_FETCH}")
        payloads = self._s.store.payloads(wanted)
        gone = [key for key, payload in zip(wanted, payloads, strict=True) if payload is None]
        if gone:
            raise LedgerError(
                f"the payload of sample {'/'.join(map(str, gone[0]))} is gone ({len(gone)} of {len(wanted)})"
            )
        name = peer.decode(errors="replace").partition("/")[0]
        if name in self._s.fetched or len(self._s.fetched) < MAX_WATCHERS:
            self._s.fetched[name] += len(wanted)
        self._s.send(peer, "samples", *[p for p in payloads if p is not None], id=id, keys=keys)

    def _ack_step(
        self, peer: bytes, *, id: int, epoch: int, step: int, applied: bool, reason: str, settings: Fields, digest: str,
        optimizer_span: list[Any],
    ) -> None:  # fmt: skip
        s = self._s
        span = parse.span(optimizer_span, "ack_step.optimizer_span")
        try:
            json.dumps(settings, allow_nan=False)
        except (TypeError, ValueError) as e:
            raise WireError("wrong_type", f"ack_step.settings: {e}") from None
        before = s.ledger.counters.step
        s.ledger.acknowledge(
            epoch, step, applied=applied, reason=parse.word(reason) if reason else "", settings=settings,
            digest=digest, optimizer_span=span,
        )  # fmt: skip
        s.commit()
        if s.ledger.counters.step > before:
            s.overlap.stepped(span)
            if not applied and s.parked is not None and s.parked.step == step + 1:
                s.parked.version = s.ledger.counters.version  # asked ahead for the version that was not made
        wanted = s.store.redo_bytes > s.config.ledger.redo_bytes
        s.send(
            peer, "stepped", id=id, version=s.ledger.counters.version, checkpoint_wanted=wanted, stats=stats(s)
        )  # fmt: skip

    def _return(self, peer: bytes, *, id: int, epoch: int, step: int, reason: str) -> None:
        if self._s.ledger.return_claim(epoch, step):
            self._s.log.warning("the learner gave the batch of step %d back: %s", step, reason[:200])
        self._s.send(peer, "done", id=id)

    def _checkpoint(self, peer: bytes, *, id: int, epoch: int, step: int, path: str) -> None:
        self._s.ledger.checkpoint_valid(epoch, step, path)
        self._s.send(peer, "done", id=id)

    def _row(self, peer: bytes, *, id: int, epoch: int, after: int) -> None:
        self._s.ledger.fence(epoch)
        found = self._s.store.step_after(after)
        if found is None:
            self._s.send(peer, "step_row", id=id)
        else:
            row, groups = found
            self._s.send(peer, "step_row", pack(row), *_chunks(groups), id=id)

    def _validate(self, peer: bytes, *, id: int, epoch: int, step: int, version: int) -> None:
        num_prompts = len(self._s.prompts["eval"].rows)
        if not num_prompts:
            raise LedgerError("there are no held-out prompts: give data.val_files, or set trainer.test_freq=-1")
        self._s.ledger.validate(epoch, step, version, num_prompts)
        self._s.send(peer, "done", id=id)

    def _validations(self, peer: bytes, *, id: int, epoch: int) -> None:
        self._s.ledger.fence(epoch)
        results = [
            {
                "step": v.step, "version": v.version, "num_samples": v.num_scored, "num_dropped": v.num_dropped,
                "score": v.total / v.num_scored if v.num_scored else None,
            }
            for v in self._s.ledger.validations.values()
            if v.done
        ]  # fmt: skip
        self._s.send(peer, "validation_results", id=id, asked=list(self._s.ledger.validations), results=results)

    def _status(self, peer: bytes, *, id: int) -> None:
        self._s.send(peer, "status_is", id=id, status=status(self._s))

    def _rollback(
        self, peer: bytes, *, id: int, run: str, epoch: int, step: int, who: str, lr_factor: float
    ) -> None:  # fmt: skip
        s = self._s
        self._refuse_other_run(run)
        if not 0 < lr_factor <= 1:
            raise WireError("wrong_value", f"rollback.lr_factor: {lr_factor} is not in (0, 1]")
        if epoch >= 0:
            s.ledger.fence(epoch)  # asked again it says: rolled back
        before = s.ledger.drops.get(ROLLED_BACK, Drops()).count
        version = s.ledger.roll_back(step, who=who[:100], at=time.time(), lr_factor=lr_factor)
        s.commit()
        s.log.warning("%s rolled the run back to the checkpoint of step %d: version %d", who[:100], step, version)
        if (parked := s.parked) is not None:
            s.parked = None
            try:
                s.ledger.fence(parked.epoch)
            except FencedError as e:
                self._error(parked.peer, parked.id, e)
        dropped = s.ledger.drops.get(ROLLED_BACK, Drops()).count - before
        s.send(peer, "rolled_back", id=id, step=s.ledger.counters.step, version=version, dropped=dropped)

    # ------------------------------------------------------------ claims
    def _sound_claim(self, parked: Parked) -> Claim | str | None:
        """A claim whose payloads are as they were stored; groups that are damaged are dropped by name."""
        s = self._s
        while True:
            claim = s.ledger.claim(parked.epoch, parked.step, parked.version, parked.num_groups, s.clock())
            if not isinstance(claim, Claim):
                return claim
            s.commit()
            damaged = [key for key in claim.keys if not s.store.is_sound(s.ledger.live[key])]
            if not damaged:
                return claim
            s.ledger.return_claim(parked.epoch, parked.step)
            for key in damaged:
                s.log.error("group %d/%d is damaged in %s: dropped, its prompt is tried again", *key, s.store.path)
                s.ledger.drop_damaged(key)

    def _send_claim(self, peer: bytes, id: int, claim: Claim) -> None:
        live = self._s.ledger.live
        groups = [{"group": g, "attempt": a, "samples": live[g, a].sound} for g, a in claim.keys]
        self._s.send(
            peer, "claimed", *_chunks(groups), id=id, step=claim.step, version=claim.version, limit=claim.limit,
            short=claim.short,
        )  # fmt: skip

    def _error(self, peer: bytes, id: int, error: Exception) -> None:
        kinds: dict[type[Exception], str] = {
            FencedError: "fenced", RolledBackError: "rolled_back", NoSignalError: "no_signal"
        }  # fmt: skip
        kind = kinds.get(type(error), "ledger")
        self._s.refused[f"learner_{kind}"] += 1
        self._s.log.warning("refused: %s", error)
        self._s.send(peer, "error", id=id, kind=kind, detail=str(error)[:1000])


def _chunks(groups: list[Fields]) -> list[bytes]:
    """Groups in frames of a bounded number of sample headers."""
    frames: list[list[Fields]] = [[]]
    num = 0
    for group in groups:
        if num and num + len(group["samples"]) > SAMPLES_PER_FRAME:
            frames.append([])
            num = 0
        frames[-1].append(group)
        num += len(group["samples"])
    return [pack(frame) for frame in frames if frame]
