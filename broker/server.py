"""The broker's loop: a socket around the service.

Consumes the messages of generators and learner; produces leases, acknowledgements, batches. Waits
for a message, at most until the next lease may expire. Unblocked by messages and by stop.

Samples are gathered for up to `TURN_S`, so that many share a transaction. What the learner asks is answered
before the next message is read, and a generator that owes nothing more does not wait for others' samples.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker import generator_desk, learner_desk
from broker.generator_desk import GeneratorDesk
from broker.learner_desk import LearnerDesk
from broker.ledger import Ledger
from broker.prompts import Prompts
from broker.records import Lane, Rules
from broker.service import Directory, Service
from broker.store import Store
from common.config import HOST_KEYS, Config
from common.data import as_list, open_rows
from common.errors import ConfigError, ControlError, WireError
from common.failpoints import failpoint
from common.limits import STALENESS
from common.loading import flat
from common.logs import LOGGER
from common.preflight import MAY_CHANGE
from common.sockets import Router
from common.wire import GENERATOR_OPS, LEARNER_OPS, decode

LEDGER = "ledger.sqlite"
MESSAGES_PER_TURN = 512
TURN_S = 0.02  # while samples come in, one transaction in so much time, not one for each
TICK_S = 0.25  # how soon a stop, another limit or another registry entry is seen
GC_ALLOCATIONS = 20_000  # between two searches for cycles: messages make none, and are many
MAX_LOST_BATCHES = 32  # the run ends after so many batches' attempts of which not one could be sampled and scored
TURNS_SHARE = 0.25  # of the time may go into transactions that only idle generators wait for
LATER, SOON, NOW = range(3)  # an answer: within TURN_S; as soon as TURNS_SHARE allows; before the next message
LEARNERS = frozenset(learner_desk.OPS)
OPS = {op: GENERATOR_OPS[op] for op in generator_desk.OPS} | {op: LEARNER_OPS[op] for op in learner_desk.OPS}


class Server:
    """One broker."""

    def __init__(self, service: Service, router: Router) -> None:
        self.service = service
        self._router = router
        self._generators = GeneratorDesk(service)
        self._learner = LearnerDesk(service)
        self._turned_at = self._turn_s = 0.0  # when the last turn ended, and what it took
        self._model: str | None = None
        self._refused_limit: Any = None

    def run(self, stop: threading.Event, on_turn: Callable[[Service], None] | None = None) -> None:
        """Until ``stop`` is set; then leases end, and the ledger is left complete.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        gc.set_threshold(GC_ALLOCATIONS)
        while not stop.is_set():
            self._take_messages()
            began = self.service.clock()
            self.turn()
            self._turned_at = self.service.clock()
            self._turn_s = self._turned_at - began
            if on_turn is not None:
                on_turn(self.service)
        self.service.closing = True
        self.service.ledger.release_leases("shutdown")
        self.turn()

    def _take_messages(self) -> None:
        """Those that are there, and those that come until an answer must leave."""
        message, num, haste = self._router.receive(self._patience()), 0, LATER
        while message is not None:
            haste = max(haste, self.handle(*message))
            num += 1
            if haste == NOW or num == MESSAGES_PER_TURN:
                return
            message = self._router.receive(0)
            if message is None:
                wait_s = TURN_S if haste == LATER else min(TURN_S, self._turn_s / TURNS_SHARE - self._turn_s)
                message = self._router.receive(self._turned_at + wait_s - self.service.clock())

    def handle(self, peer: bytes, frames: list[bytes]) -> int:
        """One message; what cannot be read is refused with the reason, and counted. Returns how its answer hurries."""
        s, before = self.service, self.service.ledger.num_ready
        try:
            op, fields, payload = decode(frames, OPS)
            if op in LEARNERS:
                self._learner.handle(peer, op, fields)
                return LATER if op == "claim" and s.parked is not None and before < s.parked.num_groups else NOW
            self._generators.handle(peer, op, fields, payload)
            if s.parked is not None and s.ledger.num_ready >= s.parked.num_groups:
                return NOW if before < s.parked.num_groups else SOON
            return SOON if op == "hello" or (op == "sample" and self._generators.is_idle(peer)) else LATER
        except WireError as e:
            s.refused[e.reason] += 1
            if s.refused[e.reason] == 1:
                s.log.warning("a message from %r is refused: %s", peer[:40], e)
            s.send(peer, "refused", re="message", reason=e.reason, detail=str(e)[:500])
            return LATER

    def turn(self) -> None:
        """What follows from the messages; commit; answer."""
        s = self.service
        now = s.clock()
        self._look_around()
        self._generators.turn(now)
        if self._learner.turn(now):
            self._generators.turn(now)  # damaged groups have made room
        s.commit()
        for peer, frames in s.take_outbox():
            self._router.send(peer, frames)
        failpoint("broker.after_send")

    def _patience(self) -> float:
        expiry = self.service.ledger.next_expiry()
        return TICK_S if expiry is None else min(TICK_S, max(0.0, expiry - self.service.clock()))

    def _look_around(self) -> None:
        """What run control says now: the staleness limit, the model's vocabulary."""
        s = self.service
        limit = s.directory.limit(STALENESS)
        lowest = s.config.weights.publish_every - 1  # below it the lease gate would close for ever
        if type(limit) is int and limit != s.ledger.limit and limit >= max(0, lowest):
            s.log.info("staleness.max is now %d", limit)
            s.ledger.set_limit(limit)
        elif limit not in (None, s.ledger.limit, self._refused_limit):
            self._refused_limit = limit
            s.log.warning("staleness.max=%r is not taken: it must be a whole number from %d", limit, max(0, lowest))
        if s.vocab_size is None and (folder := s.directory.model()) is not None and folder != self._model:
            self._model = folder
            s.vocab_size = read_vocab_size(Path(folder))


def open_service(
    config: Config, directory: Directory, run_dir: Path, *, begun: str = "", log: Any = None, clock: Any = None
) -> Service:
    """The ledger of a run, opened or restored, and everything around it.

    begun: what the run's registry calls this beginning of the run; a broker that ended comes back to the same.

    Raises:
        ConfigError: bad prompts; a run that was begun before, and ``trainer.resume_mode`` off.
        LedgerError: the ledger is held by another broker, damaged, or of another run.
    """
    import logging
    import time

    clock = clock or time.monotonic
    prompts: dict[Lane, Prompts] = {
        "train": Prompts(open_rows(config, "train"), config.run.seed, config.data.shuffle, config.trainer.total_epochs),
        "eval": Prompts(open_rows(config, "val"), shuffle=False, epochs=1),
    }
    in_a_pass = config.ledger.max_attempts * len(prompts["train"].rows)
    rules = Rules(
        group_size=config.samples_per_group,
        batch_size=config.data.train_batch_size,
        max_attempts=config.ledger.max_attempts,
        lease_timeout_s=config.ledger.lease_timeout_s,
        lease_limit_s=config.ledger.lease_limit_s,
        num_prompts=prompts["train"].count,
        policy=config.staleness.policy,
        wait_s=config.staleness.wait_s,
        greedy_index=config.greedy_index,
        untrained_bytes=config.ledger.untrained_bytes,
        filter_groups=config.algorithm.filter_groups.enable,
        max_lost=min(in_a_pass, MAX_LOST_BATCHES * config.data.train_batch_size),
        max_filtered=config.algorithm.filter_groups.max_num_gen_batches * config.data.train_batch_size,
    )
    store = Store(
        run_dir / LEDGER,
        identity=_identity(config, prompts),
        fsync=config.ledger.fsync,
        keep_bytes=config.ledger.keep_bytes,
    )
    try:
        _begin(store, config, begun)
    except ConfigError:
        store.close()
        raise
    ledger = Ledger(rules, limit=config.staleness.max, snapshot=store.snapshot(), now=clock())
    return Service(config, ledger, store, prompts, directory, log or logging.getLogger(LOGGER), clock)


def open_router(service: Service) -> Router:
    """On the port of the broker before this one if it is free, so that its peers find it again by themselves."""
    host = service.config.run.bind_host
    port = service.store.get("port") or 0
    try:
        router = Router(host, port)
    except ControlError:
        if not port:
            raise
        router = Router(host)
    service.store.put("port", int(router.address.rpartition(":")[2]))
    return router


def read_vocab_size(folder: Path) -> int | None:
    """Number of token ids of the model in ``folder``; None if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _identity(config: Config, prompts: dict[Lane, Prompts]) -> dict[str, Any]:
    """What must stay the same for the life of a ledger: the data, and the config but what may change."""
    free = (*MAY_CHANGE, "run.dir:")
    same = {k: v for k, v in flat(config).items() if not f"{k}:".startswith(free) and k not in HOST_KEYS}
    return same | {
        "data.train_files": as_list(config.data.train_files),
        "training prompts": len(prompts["train"].rows),
    }


def _begin(store: Store, config: Config, begun: str) -> None:
    """Note this beginning of the run. Raises ConfigError if there was another, and the run is not to be continued."""
    before = store.get("begun")
    if before not in (None, begun) and config.trainer.resume_mode == "off":
        raise ConfigError(
            f"run.dir={store.path.parent}: already has a run; set trainer.resume_mode=auto or choose another run.dir"
        )
    store.put("begun", begun)
