"""The engine's side of the weights' control dialogue (``CONTROL_OPS``).

Dials the learner whose address the registry has, says which version the engine holds, and does
what it is told: stage a version while the engine samples on, then swap it in. Whatever breaks
before the swap changes nothing. It obeys the highest epoch it has met and takes no version that
is not above its own. Consumes messages of the learner and events of the workers; waits for a
learner in the registry; unblocked by either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.canary import Canary
from common.errors import DisprovedError, EngineError, LeewayError, OtherModelError, WeightError, WireError
from common.failpoints import failpoint
from common.logs import LOGGER
from common.sockets import AsyncDealer, Mailbox
from common.wire import CONTROL_OPS, WORKER_OPS, decode, encode

LOOKUP_S = 0.5  # the registry is asked so often for a learner
BEAT_S = 1.0  # at most; a quarter of the timeout if that is less
SILENCE_BEATS = 8  # a learner that answers none of so many beats is dialled anew

_log = logging.getLogger(LOGGER)


class SwappableEngine(Protocol):
    """What this file needs of ``generators/engine.py``."""

    version: int
    mailbox: Mailbox
    num_receivers: int  # of its workers; one does for all that share its memory

    @property
    def dead(self) -> bool: ...

    async def stage(self, *, on_ready: Callable[[], None], manifest: bytes, **transfer: Any) -> int | None: ...

    async def swap(self, version: int, canary: Canary | None, timeout_s: float) -> Swapped: ...


@dataclass(frozen=True)
class Swapped:
    """How a swap went."""

    pause_s: float
    difference: float = -1.0  # of log-probs, against the canary; -1: nothing was compared


@dataclass
class _Transfer:
    """The transfer that the learner has announced last."""

    number: int
    version: int
    workers: set[int] = field(default_factory=set)  # that have it
    staged: bool = False


class Member:
    """One engine as a member of the learner's roster. All methods are for one asyncio loop."""

    def __init__(
        self,
        *,
        engine: SwappableEngine,
        run_id: str,
        name: str,
        incarnation: str,
        lookup_address: Callable[[], str | None],
        on_version: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            lookup_address: the learner's control address as the registry has it now.
            on_version: called with each version as soon as the engine samples with it.
        """
        self.engine, self.on_version = engine, on_version
        self._run_id, self._name, self._incarnation = run_id, name, incarnation
        self._lookup_address = lookup_address
        self.epoch = -1  # highest one met
        self.state = "waits for a learner"
        self._beat_s = BEAT_S
        self._timeout_s = 4 * BEAT_S  # the learner's, once it was heard
        self._num_connections = 0
        self._transfer: _Transfer | None = None
        self._line: AsyncDealer | None = None
        self._work = asyncio.Lock()  # one prepare or swap at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """For ever: talk to the learner, and to the next one when it is replaced or falls silent.

        Raises:
            EngineError: the engine died, a load failed half way, or the learner sent it away.
            OtherModelError: the learner trains another model than the engine was started with.
        """
        parts = [
            asyncio.create_task(self._read_events(), name="weight-events"),
            asyncio.create_task(self._talk_for_ever(), name="weight-control"),
        ]
        try:
            await asyncio.wait([*parts, self._failed], return_when=asyncio.FIRST_COMPLETED)
            for part in (self._failed, *parts):
                if part.done():
                    part.result()
        finally:
            for task in (*parts, *self._tasks):
                task.cancel()
            await asyncio.wait(parts)
            self._hang_up(linger_s=0.5)

    # ------------------------------------------------------------ the line to the learner
    async def _talk_for_ever(self) -> None:
        while True:
            address = self._lookup_address()
            if address is None:
                self.state = "waits for a learner in the registry"
                await asyncio.sleep(LOOKUP_S)
                continue
            self._num_connections += 1
            identity = f"{self._name}/{self._incarnation}/{self._num_connections}"
            self._line = AsyncDealer(address, identity.encode())
            self.state = f"greets the learner at {address}"
            await self._talk(address, self._line)
            self._hang_up()  # at the end `run` does, with a goodbye

    async def _talk(self, address: str, line: AsyncDealer) -> None:
        """Until the registry names another learner, or this one stays silent."""
        heard = last_beat = time.monotonic()
        self._hello()
        incoming = asyncio.ensure_future(line.receive())
        try:
            while self._lookup_address() in (address, None):
                now = time.monotonic()
                await asyncio.wait([incoming], timeout=max(0.0, last_beat + self._beat_s - now))
                if incoming.done():
                    heard = time.monotonic()
                    self._receive(incoming.result())
                    incoming = asyncio.ensure_future(line.receive())
                now = time.monotonic()
                if now >= last_beat + self._beat_s:
                    last_beat = now
                    self._beat()
                if now - heard > SILENCE_BEATS * self._beat_s:
                    _log.warning("the learner at %s has been silent for %.1f s", address, now - heard)
                    return
        finally:
            incoming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await incoming

    def _hello(self) -> None:
        self._send(
            "hello", run=self._run_id, name=self._name, incarnation=self._incarnation,
            version=self.engine.version, num_workers=self.engine.num_receivers,
        )  # fmt: skip

    def _beat(self) -> None:
        self._send("beat", version=self.engine.version, state=self.state)

    def _send(self, op: str, **fields: Any) -> None:
        if self._line is not None:
            self._line.post(encode(op, **fields))

    def _hang_up(self, linger_s: float = 0.0) -> None:
        if self._line is not None:
            if linger_s:
                self._send("leave")
            self._line.close(linger_s)
            self._line = None

    # ------------------------------------------------------------ messages of the learner
    def _receive(self, frames: list[bytes]) -> None:
        try:
            op, fields, payload = decode(frames, CONTROL_OPS)
        except WireError as e:
            _log.warning("a message of the learner cannot be read: %s", e)
            return
        if op in ("welcome", "prepare") and not self._obeys(fields["epoch"]):
            return
        if op == "welcome":
            self._timeout_s = fields["timeout_s"]
            self._beat_s = min(BEAT_S, self._timeout_s / 4)
            if self._transfer is None:
                self.state = "idle"
        elif op == "prepare":
            self._transfer = _Transfer(fields["number"], fields["version"])
            self._spawn(self._prepare(self._transfer, fields, payload))
        elif op == "swap":
            self._spawn(self._swap(fields["number"], fields["version"], payload))
        elif op == "abort":
            self._abort(fields["number"], fields["reason"])
        elif op == "refused" and fields["reason"] == "unknown_member":
            self._hello()
        elif op == "refused" and fields["reason"] == "disproved":
            self._fail(EngineError(f"this engine does not compute what the learner does, {fields['detail']}"))
        elif op == "refused":
            _log.warning("the learner refuses this engine: %s (%s)", fields["reason"], fields["detail"])

    def _obeys(self, epoch: int) -> bool:
        """A learner with a lower epoch than one met before has been replaced; say so."""
        if epoch < self.epoch:
            _log.warning("refused a learner of epoch %d: %d has taken over", epoch, self.epoch)
            self._send("fenced", epoch=self.epoch)
            return False
        self.epoch = epoch
        return True

    async def _prepare(self, transfer: _Transfer, fields: dict[str, Any], payload: list[bytes]) -> None:
        async with self._work:
            if transfer is not self._transfer:
                return  # a newer one came meanwhile
            failpoint("member.prepare")
            if transfer.version <= self.engine.version:
                raise WeightError(f"version {transfer.version} is not above {self.engine.version}, which it holds")
            if len(payload) != 1:
                raise WeightError("no manifest")
            self.state = f"stages version {transfer.version}"
            digest = await self.engine.stage(
                on_ready=lambda: self._send("prepared", number=transfer.number), number=transfer.number,
                version=transfer.version, manifest=payload[0],
                ticket=[fields[name] for name in ("transport", "host", "port", "prefix")], rank=fields["rank"],
                world_size=fields["world_size"], timeout_s=fields["timeout_s"],
            )  # fmt: skip
            if digest is not None and transfer is self._transfer:
                self._has_staged(transfer, digest)

    async def _swap(self, number: int, version: int, payload: list[bytes]) -> None:
        async with self._work:
            transfer = self._transfer
            if transfer is None or transfer.number != number or not transfer.staged:
                return
            failpoint("member.swap")
            canary = Canary.decode(payload[0]) if payload else None
            self.state = f"swaps to version {version}" + (", to be proven" if canary else "")
            try:
                swapped = await self.engine.swap(version, canary, self._timeout_s)
            except DisprovedError as e:
                self._disproved(transfer, e)
                return
            self._transfer = None
            self.state = "idle"
            failpoint("member.held")
            self._send("held", number=number, version=version, pause_s=swapped.pause_s, difference=swapped.difference)
            if self.on_version is not None:
                self.on_version(version)

    def _disproved(self, transfer: _Transfer, error: DisprovedError) -> None:
        """The engine holds nothing now; the learner sends a version again, or sends the engine away."""
        _log.warning("version %d: %s", transfer.version, error)
        if self._transfer is transfer:
            self._transfer = None
            self.state = "idle"
        difference = error.difference if math.isfinite(error.difference) else -1.0
        self._send(
            "disproved", number=transfer.number, version=transfer.version, difference=difference, reason=str(error)
        )
        if self.on_version is not None:
            self.on_version(self.engine.version)

    def _abort(self, number: int, reason: str) -> None:
        if self._transfer is not None and self._transfer.number == number:
            _log.warning("version %d was not delivered: %s", self._transfer.version, reason)
            self._transfer = None
            self.state = "idle"

    # ------------------------------------------------------------ events of the workers
    async def _read_events(self) -> None:
        while True:
            op, fields, _ = decode(await self.engine.mailbox.receive(), WORKER_OPS)
            transfer = self._transfer
            if transfer is None or fields["number"] != transfer.number:
                continue
            if op == "failed":
                self._give_up(transfer, f"worker {fields['worker']}: {fields['reason']}")
                continue
            transfer.workers.add(fields["worker"])
            if len(transfer.workers) == self.engine.num_receivers:
                self._has_staged(transfer, fields["digest"])

    def _has_staged(self, transfer: _Transfer, digest: int) -> None:
        transfer.staged = True
        failpoint("member.staged")
        self.state = f"has staged version {transfer.version}"
        self._send("staged", number=transfer.number, digest=digest)

    def _give_up(self, transfer: _Transfer, reason: str) -> None:
        """Tell the learner, and what the engine holds now (nothing, if a load as it came was torn)."""
        if self._transfer is transfer:
            self._transfer = None
            self.state = "idle"
        _log.warning("version %d: %s", transfer.version, reason)
        self._send("failed", number=transfer.number, version=self.engine.version, reason=reason)

    def _fail(self, error: LeewayError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _spawn(self, work: Any) -> None:
        """Run ``_prepare`` or ``_swap`` beside the dialogue."""
        transfer = self._transfer

        async def guarded() -> None:
            held = self.engine.version
            try:
                await work
            except Exception as e:
                if self.engine.version < held and self.on_version is not None:
                    self.on_version(self.engine.version)
                if self.engine.dead:
                    self._fail(e if isinstance(e, EngineError) else EngineError(repr(e)))
                elif transfer is not None:
                    self._give_up(transfer, str(e) if isinstance(e, LeewayError) else repr(e))
                if isinstance(e, OtherModelError):
                    self._fail(OtherModelError(f"{e}; start this generator with the learner's config and model"))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
