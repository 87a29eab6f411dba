"""Figures of the broker: a real broker process under load, and the bookkeeping alone.

The generators are simulated: they speak the real protocol over real sockets and send one made-up
sample again and again. Run control is left out: every generator is taken as registered.
"""

from __future__ import annotations

import heapq
import logging
import multiprocessing
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import zmq

from benchmarks.figures import Figure, benchmark
from broker.ledger import Ledger
from broker.records import Attempt, Rules
from broker.server import Server, open_router, open_service
from broker.store import NewSample, Store
from common.config import Config
from common.loading import load_config
from common.sockets import Router
from common.wire import GENERATOR_OPS, decode, encode, encode_sample, pack, unpack
from learner.feed import Feed
from tests.simulated import make_sample

N, TOKENS, B = 8, 256, 64
SECONDS = 6.0
WINDOW = 64  # samples of one producer of the echo that are not answered yet
QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
QUICKSTART_STEP_S = 0.65  # of one step of the quick start on two quiet cores: 65 steps in 42 s (docs/evidence.md)
_SPAWN = multiprocessing.get_context("spawn")


class Everybody:
    """A registry in which every generator stands."""

    def desired(self) -> str:
        return "running"

    def limit(self, name: str) -> Any:
        return None

    def entry(self, name: str) -> Any:
        return name

    def model(self) -> str | None:
        return None


def _stop_event() -> threading.Event:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def serve_broker(folder: str, tree: dict[str, Any], ready: Connection) -> None:
    stop = _stop_event()
    service = open_service(Config.model_validate(tree), Everybody(), Path(folder), log=logging.getLogger("bench"))
    router = open_router(service)
    ready.send(router.address)
    Server(service, router).run(stop)
    router.close()
    service.store.close()


def serve_echo(_folder: str, _tree: dict[str, Any], ready: Connection) -> None:
    """The least a ROUTER can do with each message: answer it."""
    stop, router, answer = _stop_event(), Router(), [b"ok"]
    ready.send(router.address)
    while not stop.is_set():
        message = router.receive(0.1)
        while message is not None:
            router.send(message[0], answer)
            message = router.receive(0)
    router.close()


@contextmanager
def process(serve: Any, **tree: Any) -> Iterator[tuple[str, psutil.Process]]:
    """(address, process) of a server that runs inside the block."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = _SPAWN.Pipe()
        child = _SPAWN.Process(target=serve, args=(folder, tree, there))
        child.start()
        try:
            if not here.poll(60):
                raise RuntimeError("the server did not start within 60 s")
            yield here.recv(), psutil.Process(child.pid)
        finally:
            child.terminate()
            child.join(20)
            if child.is_alive():
                child.kill()


def settings(*, limit: int) -> dict[str, Any]:
    return {
        "run": {"id": "bench"}, "staleness": {"max": limit}, "rollout": {"n": N},
        "data": {"task": "reverse_digits", "train_batch_size": B, "val_size": 8},
        "ledger": {"keep_bytes": 1 << 26},
    }  # fmt: skip


@dataclass
class Load:
    """Simulated generators in one thread: each answers its leases after ``delay_s``."""

    address: str
    number: int
    capacity: int = 128
    delay_s: float = 0.0
    version: int = 0
    tells_versions: bool = True  # at once, as a real generator does; False: with the next beat
    num_leases: int = 0
    num_acked: int = 0
    latencies_s: list[float] = field(default_factory=list)  # from sending a sample to its acknowledgement
    _due: list[tuple[float, int, int, int, int]] = field(
        default_factory=list
    )  # heap: (time, generator, key)
    _sent: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = []
        for i in range(self.number):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IDENTITY, f"g{i}".encode())
            socket.connect(self.address)
            socket.send_multipart(encode("hello", run="bench", name=f"g{i}", incarnation="1", version=0))
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        self._index = {socket: i for i, socket in enumerate(self._sockets)}
        self._beats = [(time.monotonic() + 0.5 * i / self.number, i) for i in range(self.number)]  # heap
        self._told = self.version
        self._made: tuple[int, dict[str, Any], bytes] = (-1, {}, b"")  # (version, header, payload)

    def sample(self) -> tuple[dict[str, Any], bytes]:
        """Header and payload of a sample of the version held now; made once."""
        if self._made[0] != self.version:
            frames = encode_sample(make_sample(num_tokens=TOKENS, version=self.version))
            self._made = (self.version, unpack(frames[0]), frames[1])
        return self._made[1:]

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._work(now)
            for socket, _ in self._poller.poll(2):
                self._read(socket)

    def close(self) -> None:
        self._context.destroy(0)

    def _read(self, socket: Any) -> None:
        i, now = self._index[socket], time.monotonic()
        try:
            while True:
                op, fields, _ = decode(socket.recv_multipart(zmq.DONTWAIT), GENERATOR_OPS)
                if op == "lease":
                    self.num_leases += 1
                    due = now + self.delay_s
                    for index in fields["indices"]:
                        heapq.heappush(self._due, (due, i, fields["group"], fields["attempt"], index))
                elif op == "acks":
                    for key in map(tuple, fields["keys"]):
                        self.num_acked += 1
                        self.latencies_s.append(now - self._sent.pop(key))
                elif op == "refused":
                    raise RuntimeError(f"the broker refused a sample: {fields}")
        except zmq.Again:
            pass

    def _work(self, now: float) -> None:
        if self.tells_versions and self._told != self.version:
            self._beats = sorted((now, i) for _, i in self._beats)
        while self._beats[0][0] <= now:
            i, self._told = self._beats[0][1], self.version
            heapq.heapreplace(self._beats, (now + 0.5, i))
            beat = encode(
                "heartbeat", version=self._told, capacity=self.capacity, progress=[], sampling=[],
                stats={"until": time.time()},
            )  # fmt: skip
            self._sockets[i].send_multipart(beat)
        while self._due and self._due[0][0] <= now:
            _, i, group, attempt, index = heapq.heappop(self._due)
            header, payload = self.sample()
            self._sent[group, attempt, index] = now
            key = {"group": group, "attempt": attempt, "index": index}
            self._sockets[i].send_multipart([pack(header | key), payload])


class Consumer(threading.Thread):
    """A learner that trains nothing: claims and acknowledges."""

    def __init__(self, address: str, load: Load) -> None:
        super().__init__(daemon=True)
        self.stop, self._load = threading.Event(), load
        self._feed = Feed(address, run_id="bench", name="learner", stop=self.stop)
        self.num_steps = 0

    def run(self) -> None:
        at = self._feed.attach()
        step, version = at.step, at.version
        while not self.stop.is_set():
            try:
                self._feed.claim(step=step + 1, version=version, num_groups=B)
                self._feed.acknowledge(
                    step=step + 1, applied=True, reason="", settings={}, digest="", optimizer_span=[0, 0]
                )
            except Exception:
                if not self.stop.is_set():
                    raise
                break
            step, version = step + 1, version + 1
            self.num_steps, self._load.version = step, version
            if step % 20 == 0:
                self._feed.checkpoint_valid(step=step, path="none")
        self._feed.close()


def broker_rate(producers: int) -> tuple[float, float]:
    """(groups per second, µs of the broker's CPU per group)"""
    with process(serve_broker, **settings(limit=8)) as (address, broker):
        load = Load(address, producers, capacity=max(64, 1024 // producers))
        consumer = Consumer(address, load)
        consumer.start()
        load.run(1.5)
        before, cpu = load.num_acked, sum(broker.cpu_times()[:2])
        load.run(SECONDS)
        groups, cpu = (load.num_acked - before) / N, sum(broker.cpu_times()[:2]) - cpu
        consumer.stop.set()
        consumer.join(10)
        load.close()
    return groups / SECONDS, 1e6 * cpu / groups


def echo_groups_per_s(producers: int) -> float:
    """The same frames from the same number of producers, answered and nothing else."""
    with process(serve_echo) as (address, _):
        load = Load(address, producers)
        header, payload = load.sample()
        frames, answered = [pack(header), payload], 0
        for socket in load._sockets:
            for _ in range(WINDOW):
                socket.send_multipart(frames)
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end:
            for socket, _ in load._poller.poll(10):
                try:
                    while True:
                        socket.recv_multipart(zmq.DONTWAIT)
                        socket.send_multipart(frames)
                        answered += 1
                except zmq.Again:
                    pass
        load.close()
    return answered / N / (SECONDS / 2)


@benchmark
def broker_throughput() -> Iterator[Figure]:
    """Groups of 8 × 256 tokens with durable acknowledgements, a learner that claims and acknowledges beside them."""
    need = load_config([QUICKSTART], []).data.train_batch_size / QUICKSTART_STEP_S
    for producers in (1, 4, 16):
        (rate, cpu), echo = broker_rate(producers), echo_groups_per_s(producers)
        yield Figure(f"broker.groups_per_s.{producers}", rate, "groups/s")
        yield Figure(f"broker.cpu_per_group.{producers}", cpu, "µs of the broker")
        yield Figure(f"broker.share_of_echo.{producers}", rate / echo, "of a bare ROUTER/DEALER echo", "≥ 0.2")
        yield Figure(f"broker.multiple_of_quickstart.{producers}", rate / need, "× its need", "≥ 20")


@benchmark
def broker_bookkeeping() -> Iterator[Figure]:
    """CPU time of ledger and store from lease to acknowledgement, without payloads, in batches of 8 groups."""
    costs: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        book = Bookkeeping(Path(folder))
        for size in (10_000, 1_000_000):
            while book.num_samples < size:
                book.step()
            costs[size] = statistics.median(book.step() for _ in range(30))
            yield Figure(f"broker.bookkeeping.{size}", costs[size], "µs per group", "≤ 100")
        yield Figure("broker.bookkeeping_growth", costs[1_000_000] / costs[10_000], "×", "≤ 1.3")
        book.store.close()


class Bookkeeping:
    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "ledger.sqlite", identity={})
        rules = Rules(group_size=N, batch_size=B, max_attempts=3, lease_timeout_s=60.0, lease_limit_s=600.0)
        self.ledger = Ledger(rules, limit=2, snapshot=self.store.snapshot())
        self.epoch = self.ledger.attach("learner", "1")
        _, self._header, _ = decode(encode_sample(make_sample(num_tokens=TOKENS)), GENERATOR_OPS)
        self.num_samples = 0

    def step(self) -> float:
        """One batch from lease to acknowledgement; µs of CPU per group. The headers are what a message brings."""
        ledger, store, c = self.ledger, self.store, self.ledger.counters
        spent = 0.0
        for _ in range(B // 8):
            start = time.process_time()
            attempts = [ledger.lease("g", "1", c.version, 0.0) for _ in range(8)]
            store.commit(ledger.take_changes())
            spent += time.process_time() - start
            headers = [self._header_of(a, index) for a in attempts for index in range(N)]
            start, samples = time.process_time(), []
            for header in headers:
                ledger.commit("g", header, 0.0)
                samples.append(NewSample(header, b"", "g", ((c.version, 0, TOKENS),)))
            store.commit(ledger.take_changes(), samples)
            spent += time.process_time() - start
        start = time.process_time()
        claim = ledger.claim(self.epoch, c.step + 1, c.version, B)
        store.commit(ledger.take_changes())
        ledger.acknowledge(self.epoch, claim.step, applied=True)
        if claim.step % 50 == 0:
            ledger.checkpoint_valid(self.epoch, claim.step, "none")
        store.commit(ledger.take_changes())
        spent += time.process_time() - start
        self.num_samples += B * N
        return spent / B * 1e6

    def _header_of(self, a: Attempt, index: int) -> dict[str, Any]:
        v = self.ledger.counters.version
        return {**self._header, "group": a.group, "attempt": a.attempt, "index": index, "oldest": v, "newest": v}


@benchmark
def broker_many_generators() -> Iterator[Figure]:
    """1,000 simulated generators (each sleeps two seconds over a lease) against one broker."""
    with process(serve_broker, **settings(limit=64)) as (address, broker):
        # Eight versions a second, as this learner makes, no fleet of a thousand takes: beats tell of them.
        load = Load(address, 1_000, capacity=N, delay_s=2.0, tells_versions=False)
        consumer = Consumer(address, load)
        consumer.start()
        load.run(5.0)
        leases, acked, cpu = load.num_leases, load.num_acked, sum(broker.cpu_times()[:2])
        load.latencies_s.clear()
        load.run(10.0)
        yield Figure("broker.simulated_generators.leases_per_s", (load.num_leases - leases) / 10, "leases/s")
        yield Figure("broker.simulated_generators.results_per_s", (load.num_acked - acked) / 10, "samples/s")
        latency = statistics.quantiles(load.latencies_s, n=100)[98] if len(load.latencies_s) > 100 else float("nan")
        yield Figure("broker.simulated_generators.ack_p99", 1000 * latency, "ms")
        yield Figure("broker.simulated_generators.cpu", (sum(broker.cpu_times()[:2]) - cpu) / 10, "cores of the broker")
        consumer.stop.set()
        consumer.join(10)
        load.close()
