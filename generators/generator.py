"""One generator: leases in, samples out.

Consumes leases of the broker and weights of the learner. Produces samples, kept until the broker
acknowledges them, and heartbeats. Waits, by name, for the broker, the registry, the first weights,
a run that is not paused, and leases. Unblocked by the broker and by ``generators/member.py``, which
swaps weights below the running requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from common.config import Config
from common.errors import EngineError, RequestCancelled, WireError
from common.failpoints import failpoint
from common.limits import drains
from common.wire import encode, unpack
from generators.activity import Activity
from generators.environments import Environment, RowError
from generators.leases import Holdings, Lease
from generators.link import BrokerLink
from generators.rewards.scorer import Scorer
from generators.sampling import LANES, SampleMaker, SamplingEngine

RESEND_S = 5.0  # a sample not acknowledged for so long is sent again
TURNAROUND_S = 0.15  # from the end of a sample to the next lease, on a busy host
LAST_ACKS_S = 1.0  # at the end, wait so long for what was sent to be acknowledged
LONG_WAIT_S = 5.0  # waits longer than this are logged


class Generator:
    """The broker's side of one engine. All methods are for one asyncio loop."""

    def __init__(
        self,
        *,
        config: Config,
        run_id: str,
        name: str,
        incarnation: str,
        engine: SamplingEngine,
        environment: Environment,
        scorer: Scorer,
        lookup_broker: Callable[[], str | None],
        log: logging.Logger,
        desired: Callable[[], str] = lambda: "running",
        limit: Callable[[str], Any] = lambda name: None,
        on_state: Callable[[str, int], None] = lambda state, version: None,
    ) -> None:
        """
        Args:
            lookup_broker: the broker's address as the registry has it now.
            desired: the run's desired state.
            limit: a live limit of the run, None if nobody has set it.
            on_state: told what the generator does (or waits for) and the version it holds, when they change.
        """
        self.config, self.name, self.engine, self.log = config, name, engine, log
        self._environment, self._scorer = environment, scorer
        self.activity = Activity(time.time())
        self._maker = SampleMaker(name, config, engine, environment, scorer, self.activity, limit)
        self._desired, self._on_state, self._limit = desired, on_state, limit
        self.holdings = Holdings()
        self._tasks: dict[tuple[int, int], set[asyncio.Task[None]]] = {}  # by lease
        self._beat = asyncio.Event()
        self._all_acked = asyncio.Event()
        self._drained = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told_to_wait = ""
        self._row_faults: set[str] = set()  # reasons that were logged
        self._state: tuple[str, int] = ("", -1)
        self._waits_since, self._wait_logged = time.monotonic(), False
        self._stopping = False
        self._tokens_seen, self._looked_at, self._still_s = 0, time.monotonic(), 0.0
        self.link = BrokerLink(
            run_id=run_id, name=name, incarnation=incarnation, version=lambda: engine.version,
            lookup_address=lookup_broker, on_message=self._on_message, on_welcome=self._on_welcome,
            deadline_s=config.run.start_timeout_s, log=log,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Samples it is willing to hold: what the engine runs at once, and those to go on with while the
        broker stores what has ended and leases again. More would only grow old in the engine's queue."""
        if self.engine.version < 0 or self._stopping or self._desired() != "running" or self.drains:
            return 0
        seats = self.config.rollout.max_num_seqs
        ends_meanwhile = math.ceil(self.activity.samples_per_s * TURNAROUND_S)
        return seats + max(self.config.samples_per_group, min(ends_meanwhile, seats))

    @property
    def drains(self) -> bool:
        """Told to finish what it has and to end."""
        return drains(self._limit, self.name)

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``, drained, or the first error; leases are given back in any case."""
        line = asyncio.create_task(self.link.run(), name="broker-link")
        beats = asyncio.create_task(self._beat_for_ever(), name="heartbeats")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        drained = asyncio.create_task(self._drained.wait(), name="drained")
        parts: list[asyncio.Future[Any]] = [line, beats, self._failed, stopped, drained]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
        finally:
            await self._say_goodbye()
            for task in (line, beats, stopped, drained):
                task.cancel()
            await asyncio.wait([line, beats, stopped, drained])
            if self._failed.done():
                self._failed.exception()  # seen, should another part have failed first
            self.link.close(linger_s=LAST_ACKS_S)

    def version_changed(self, _version: int) -> None:
        """The engine holds other weights: tell the broker at once."""
        self._beat.set()

    async def _say_goodbye(self) -> None:
        """Give leases back, wait a moment for what was sent to be acknowledged, say goodbye."""
        self._stopping = True
        for group, attempt in list(self.holdings.leases):
            self._give_back(group, attempt, "shutdown", retry=True)
            self._abandon((group, attempt))
        self._send_heartbeat()
        if self.link.is_up and self.holdings.num_unacked:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_acked.wait(), LAST_ACKS_S)
        self.link.send(encode("bye"))

    # ------------------------------------------------------------ messages of the broker
    def _on_message(self, op: str, fields: dict[str, Any], payload: list[bytes]) -> None:
        if op == "lease":
            self._told_to_wait = ""
            self._start(payload, **fields)
        elif op == "acks":
            self.holdings.acknowledge(fields["keys"])
            if self._stopping and not self.holdings.num_unacked:
                self._all_acked.set()
        elif op == "cancel":
            self._abandon((fields["group"], fields["attempt"]))
        elif op == "wait":
            self._told_to_wait = fields["reason"]

    def _on_welcome(self) -> None:
        """A broker that may know nothing of the last connection: say everything that matters again."""
        for frames in self.holdings.overdue(time.monotonic(), 0.0):
            self.link.send(frames)
        self._beat.set()

    def _start(
        self, payload: list[bytes], group: int, attempt: int, indices: list[int], lane: str, limit_s: float
    ) -> None:
        if self._stopping:
            return self._give_back(group, attempt, "shutdown", retry=True)
        try:
            row = unpack(payload[0])
            if lane not in LANES:
                raise KeyError(lane)
            fault = self._scorer.row_fault(row)
            if fault:
                raise RowError(*fault)
            lease = Lease(group, attempt, lane, row, self._environment.prompt_ids(row))
        except RowError as e:
            if e.reason not in self._row_faults:  # thousands of rows may have the same fault
                self.log.warning("group %d cannot be worked on: %s", group, e)
            self._row_faults.add(e.reason)
            return self._give_back(group, attempt, e.reason, retry=False)
        except (WireError, IndexError, KeyError, TypeError) as e:
            self.log.warning("group %d: the lease has no prompt row (%s: %s)", group, type(e).__name__, e)
            return self._give_back(group, attempt, "bad_row", retry=False)
        lease, new, made = self.holdings.open(lease, indices)
        for frames in made:
            self.link.send(frames)
        tasks = self._tasks.setdefault(lease.key, set()) if new else set()
        for index in new:
            task = asyncio.create_task(self._make_sample(lease, index))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return None

    def _give_back(self, group: int, attempt: int, reason: str, *, retry: bool) -> None:
        self.link.send(encode("give_back", group=group, attempt=attempt, reason=reason, retry=retry))

    def _abandon(self, key: tuple[int, int]) -> None:
        """End the requests of a lease and forget it."""
        self.holdings.drop(key)
        for task in self._tasks.pop(key, ()):
            task.cancel()

    async def _make_sample(self, lease: Lease, index: int) -> None:
        try:
            frames = await self._maker.make(lease, index)
        except RequestCancelled:
            return
        except Exception as e:  # the engine or the reward process is gone: so is this generator
            if not self._failed.done():
                self._failed.set_exception(e)
            return
        if self.holdings.finish(lease, index, frames, time.monotonic()):
            if lease.key not in self.holdings.leases:
                self._tasks.pop(lease.key, None)
            failpoint("generator.sample_made")
            self.link.send(frames)

    # ------------------------------------------------------------ heartbeats
    async def _beat_for_ever(self) -> None:
        while True:
            self._beat.clear()
            self._send_heartbeat()
            self._say_state()
            self._look_at_engine(time.monotonic())
            if self.drains and not self.holdings.leases and not self.holdings.num_unacked:
                self._drained.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat.wait(), self.config.rollout.heartbeat_s)

    def _look_at_engine(self, now: float) -> None:
        """An engine whose requests make no token is frozen: end with it, else it uses up one lease after the other."""
        # This process may have been stopped itself: a beat is a beat, however late.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * self.config.rollout.heartbeat_s), now
        if self.activity.tokens != self._tokens_seen:
            self._tokens_seen, self._still_s = self.activity.tokens, 0.0
        elif self.activity.running and self.engine.version >= 0:
            self._still_s += elapsed
        if self._still_s >= self.config.ledger.lease_timeout_s and not self._failed.done():
            self._failed.set_exception(
                EngineError(
                    f"the engine made no token for {self._still_s:.0f} s, with {self.activity.running} requests "
                    "running; it hangs (if it is only slow, raise ledger.lease_timeout_s)"
                )
            )

    def _send_heartbeat(self) -> None:
        if not self.link.is_up:
            return  # spans and figures wait for the broker
        sampling, stats = self.activity.report(time.time())
        self.link.send(
            encode(
                "heartbeat", version=self.engine.version, capacity=self.capacity,
                progress=self.holdings.progress(), sampling=sampling, stats=stats,
            )
        )  # fmt: skip
        for frames in self.holdings.overdue(time.monotonic(), RESEND_S):
            self.link.send(frames)

    def waits_for(self) -> str | None:
        """The name of what keeps this generator from sampling; None while it samples."""
        if not self.link.is_up:
            return f"the broker at {self.link.address}" if self.link.address else "a broker in the registry"
        if self.engine.version < 0:
            return "the first weights of the learner"
        if self._desired() != "running":
            return f"the run, which is {self._desired()}"
        if self.drains:
            return f"{len(self.holdings.leases)} leases to finish: it drains"
        if not self.holdings.leases:
            return f"leases of the broker: {self._told_to_wait or 'none sent yet'}"
        return None

    def _say_state(self) -> None:
        wait = self.waits_for()
        state = (f"waits for {wait}" if wait else "samples", self.engine.version)
        now = time.monotonic()
        if state != self._state:
            if state[0] != self._state[0]:
                self._waits_since, self._wait_logged = now, False
            self._state = state
            self._on_state(*state)
        if wait and not self._wait_logged and now - self._waits_since > LONG_WAIT_S:
            self._wait_logged = True
            self.log.info("waits for %s", wait)
