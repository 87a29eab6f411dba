"""One suite for all ways to carry weights: the learner's end in this process, a worker's in another."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from common.buffers import Buffer
from common.errors import WeightError
from common.file_snapshot import FileTransport, read
from common.snapshot import CHUNK_BYTES, WINDOW, SnapshotTransport, pull
from common.stored import Stored, write_version
from common.transfer import KeptGroups, StoreTransport, Ticket, Transport
from common.weights import lay_out
from tests.system.test_publish import until

TIMEOUT_S = 1.5
NUM_BUCKETS, BUCKET_BYTES = 8, 3_000_000  # not a multiple of a chunk

WORKER = """
import sys, torch
from common.processes import die_with_parent
from common.transfer import Ticket, join_group
die_with_parent()
print("ready", flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word != "join":
        print(line, end="", flush=True)
        continue
    name, rank, world_size, timeout_s, stop_after, host, port, prefix = rest
    try:
        group = join_group(
            Ticket(name, host, int(port), prefix), rank=int(rank), world_size=int(world_size),
            timeout_s=float(timeout_s)
        )
        for index in range(int(stop_after)):
            bucket = torch.zeros({bytes}, dtype=torch.uint8)
            group.receive(bucket)
            print("bucket", index, int(bucket.long().sum()), bool((bucket == index + 1).all()), flush=True)
        sys.stdin.readline()
        group.close()
    except Exception as e:
        print("error", type(e).__name__, e, flush=True)
"""


class Worker:
    """A process that joins when told, receives ``stop_after`` buckets, and holds the group until the next line."""

    def __init__(self) -> None:
        code = WORKER.replace("{bytes}", str(BUCKET_BYTES))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def join(self, ticket: Ticket, *, rank: int = 1, world_size: int = 2, stop_after: int = NUM_BUCKETS) -> None:
        where = f"{ticket.host} {ticket.port} {ticket.prefix}"
        self.say(f"join {ticket.transport} {rank} {world_size} {TIMEOUT_S} {stop_after} {where}")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def next(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends_its_work(self) -> bool:
        """Make it fit for the next test, if it still lives."""
        try:
            self.say("close")
            self.say("next")
        except OSError:
            return False
        while (line := self.next()) != "next":
            if not line:
                return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


class SimulatedShelf:
    """A learner's stored version: the bytes of all buckets, in five tensors that end somewhere in them."""

    def __init__(self, folder: Path) -> None:
        buffer = Buffer()
        size = NUM_BUCKETS * BUCKET_BYTES // 5
        buffer.prepare(lay_out([(f"part.{i}", "uint8", (size,)) for i in range(5)], BUCKET_BYTES))
        torch.cat([bucket(i) for i in range(NUM_BUCKETS)], out=buffer.bytes)
        write_version(folder, buffer, 7, shard_bytes=2 * size)
        assert buffer.manifest is not None and buffer.manifest.total_bytes == 5 * size
        self._stored = Stored(7, folder, buffer.manifest)
        self.given_back = 0

    def take(self, ticket: Ticket, meanwhile: Callable[[], None]) -> Stored:
        meanwhile()
        return self._stored

    def give_back(self, stored: Stored) -> None:
        self.given_back += 1


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> SimulatedShelf:
    return SimulatedShelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(params=["gloo", "snapshot", "file"])
def transport(request: pytest.FixtureRequest, shelf: SimulatedShelf) -> Iterator[Transport]:
    made: Transport
    if request.param == "file":
        made = FileTransport("127.0.0.1", timeout_s=TIMEOUT_S, shelf=shelf)
    else:
        made = (StoreTransport if request.param == "gloo" else SnapshotTransport)("127.0.0.1", timeout_s=TIMEOUT_S)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for w in made:
        w.close()


@pytest.fixture
def workers(pool: list[Worker]) -> Iterator[list[Worker]]:
    """Two that live; a start costs seconds of imports."""
    fresh = [Worker() for _ in range(2 - len(pool))]
    pool += fresh
    for w in fresh:
        assert w.next() == "ready"
    yield list(pool)
    for w in list(pool):
        w.process.send_signal(signal.SIGCONT)
        if not w.ends_its_work():
            w.close()
            pool.remove(w)


def bucket(index: int) -> torch.Tensor:
    return torch.full((BUCKET_BYTES,), index + 1, dtype=torch.uint8)


def test_two_workers_of_an_engine_get_all_buckets_in_order(transport: Transport, workers: list[Worker]) -> None:
    ticket = transport.announce(1, 7)
    for rank, w in enumerate(workers, 1):
        w.join(ticket, rank=rank, world_size=3)
    group = transport.open_group(ticket, 2)
    buckets = [bucket(i) for i in range(NUM_BUCKETS)]
    for b in buckets:
        group.send(b)
    for w in workers:
        for i in range(NUM_BUCKETS):
            assert w.next() == f"bucket {i} {(i + 1) * BUCKET_BYTES} True"
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening and {c.laddr.ip for c in listening} == {"127.0.0.1"}
    group.close()
    group.close()  # twice does no harm
    again = transport.announce(1, 8)  # and another group, as if nothing had been
    assert again.prefix != ticket.prefix


def test_a_frozen_worker_costs_one_timeout_and_a_dead_one_no_more(transport: Transport, workers: list[Worker]) -> None:
    for w, action in zip(workers, (signal.SIGSTOP, signal.SIGKILL), strict=True):
        ticket = transport.announce(1, 7)
        w.join(ticket)
        group = transport.open_group(ticket, 1)
        group.send(bucket(0))
        assert w.next().startswith("bucket 0")
        w.process.send_signal(action)
        start = time.monotonic()
        with pytest.raises((RuntimeError, WeightError)):  # small sends may fit the socket's buffers
            for i in range(1, 100):
                group.send(bucket(i % 200))
        assert time.monotonic() - start < TIMEOUT_S + 1.5
        group.close()


def test_a_worker_whose_learner_closes_fails_at_once(transport: Transport, workers: list[Worker]) -> None:
    ticket = transport.announce(1, 7)
    workers[0].join(ticket)
    group = transport.open_group(ticket, 1)
    group.send(bucket(0))
    assert workers[0].next().startswith("bucket 0")
    start = time.monotonic()
    group.close()
    assert workers[0].next().startswith("error ")
    assert time.monotonic() - start < TIMEOUT_S / 2


def test_a_cancelled_transfer_lets_the_worker_go(transport: Transport, workers: list[Worker]) -> None:
    ticket = transport.announce(1, 7)
    workers[0].join(ticket)
    start = time.monotonic()
    transport.cancel(ticket)  # before it comes, or after
    assert workers[0].next().startswith("error WeightError")
    assert time.monotonic() - start < TIMEOUT_S + 1
    ticket = transport.announce(1, 8)
    workers[1].join(ticket, stop_after=1)
    group = transport.open_group(ticket, 1)
    group.send(bucket(0))
    assert workers[1].next().startswith("bucket 0")
    group.close()


def test_who_does_not_come_and_who_is_not_waited_for(transport: Transport, workers: list[Worker]) -> None:
    start = time.monotonic()
    with pytest.raises(WeightError):
        transport.open_group(transport.announce(1, 7), 1)
    workers[0].join(transport.announce(1, 8))  # nobody says go
    assert workers[0].next().startswith("error WeightError")
    assert time.monotonic() - start < 2 * TIMEOUT_S + 3


def test_groups_are_kept_by_whom_they_are_with() -> None:
    closed: list[str] = []

    class SimulatedGroup:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    def ticket(transport: str, prefix: str) -> Ticket:
        return Ticket(transport, "127.0.0.1", 1, prefix)

    kept = KeptGroups()
    one, two, three = (SimulatedGroup(n) for n in ("one", "two", "three"))
    kept.keep(b"a", ticket("gloo", "p1"), one)  # type: ignore[arg-type]
    kept.keep(b"b", ticket("snapshot", "p2"), two)  # type: ignore[arg-type]
    assert closed == ["two"] and kept.take(b"b", "snapshot") is None
    taken = kept.take(b"a", "gloo")
    assert taken is not None and taken[1] is one and kept.take(b"a", "gloo") is None
    kept.keep(b"a", ticket("gloo", "p1"), one)  # type: ignore[arg-type]
    kept.keep(b"a", ticket("gloo", "p3"), three)  # type: ignore[arg-type]
    assert closed == ["two", "one"]
    assert kept.take(b"a", "snapshot") is None and closed[-1] == "three"  # after a fault the next one is a snapshot
    kept.keep(b"a", ticket("gloo", "p4"), one)  # type: ignore[arg-type]
    kept.keep(b"b", ticket("nccl", "p5"), two)  # type: ignore[arg-type]
    kept.close_all_but({b"b"})
    assert closed[-1] == "one" and kept.take(b"b", "nccl") is not None


def test_a_worker_that_has_everything_may_leave_before_the_others() -> None:
    """The second one is a window behind when the first one says goodbye."""
    num_buckets = 3
    assert num_buckets * -(-BUCKET_BYTES // CHUNK_BYTES) == WINDOW + 1
    transport = SnapshotTransport("127.0.0.1", timeout_s=30)
    ticket = transport.announce(1, 7)
    with ThreadPoolExecutor(3) as threads:
        pulls = {f"worker-{rank}".encode(): threads.submit(pull, ticket, rank=rank, timeout_s=30) for rank in (1, 2)}
        group = transport.open_group(ticket, 2)
        first, second = (pulls[peer].result(30) for peer in group._credit)  # in the order in which they are served
        sending = threads.submit(lambda: [group.send(bucket(i)) for i in range(num_buckets)])
        for receiver in (first, second):
            for i in range(num_buckets):
                received = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
                receiver.receive(received)
                assert torch.equal(received, bucket(i))
            if receiver is first:
                first.close()
                until(lambda: group._left or sending.done(), 30, "the goodbye")
                assert not sending.done()  # it waits for the second
        sending.result(30)
    group.close()
    second.close()


def test_why_a_version_is_not_there_is_raised_before_the_workers_hear_of_an_end() -> None:
    """Else their report of the end comes first, and takes the reason's place."""

    class Empty:
        def take(self, ticket: Ticket, meanwhile: Callable[[], None]) -> Stored:
            raise WeightError("nothing was written")

        def give_back(self, stored: Stored) -> None:
            raise AssertionError("it was never taken")

    transport = FileTransport("127.0.0.1", timeout_s=30, shelf=Empty())
    ticket = transport.announce(1, 7)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(read, ticket, rank=1, timeout_s=30)
        group = transport.open_group(ticket, 1)
        receiver = joining.result(30)
    with pytest.raises(WeightError, match="nothing was written"):
        group.send(bucket(0))
    assert receiver._dealer.receive(0.2) is None
    group.close()
    with pytest.raises(WeightError, match="the learner ended the transfer"):
        receiver.receive(torch.zeros(BUCKET_BYTES, dtype=torch.uint8))
    receiver.close()


def test_a_worker_that_leaves_before_it_has_everything_is_named(workers: list[Worker]) -> None:
    transport = SnapshotTransport("127.0.0.1", timeout_s=TIMEOUT_S)
    ticket = transport.announce(1, 7)
    for rank, w in enumerate(workers, 1):
        w.join(ticket, rank=rank, world_size=3, stop_after=rank)
    group = transport.open_group(ticket, 2)
    group.send(bucket(0))
    assert workers[0].next().startswith("bucket 0")
    workers[0].say("close")
    assert workers[1].next().startswith("bucket 0")
    with pytest.raises(WeightError, match="worker 1 "):  # gave up, or is gone
        for i in range(1, 9):
            group.send(bucket(i))
    group.close()


def test_a_snapshot_is_given_only_to_who_shows_the_secret(workers: list[Worker]) -> None:
    transport = SnapshotTransport("127.0.0.1", timeout_s=TIMEOUT_S)
    ticket = transport.announce(1, 7)
    workers[0].join(Ticket(ticket.transport, ticket.host, ticket.port, "weights/1/7/guessed"))
    with pytest.raises(WeightError, match=r"0 of 1 workers came"):
        transport.open_group(ticket, 1)


def test_abort_ends_a_waiting_send_from_another_thread(workers: list[Worker]) -> None:
    transport = SnapshotTransport("127.0.0.1", timeout_s=30)
    ticket = transport.announce(1, 7)
    workers[0].join(ticket, stop_after=1)  # then it takes nothing more
    group = transport.open_group(ticket, 1)
    threading.Timer(0.5, group.abort).start()
    start = time.monotonic()
    with pytest.raises(WeightError, match="aborted"):
        for i in range(20):
            group.send(bucket(i))
    assert time.monotonic() - start < 5
    group.close()
