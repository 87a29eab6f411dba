"""Weights in flight: each figure is a ratio of two things measured in turn in one run, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from benchmarks.figures import Figure, benchmark
from common.buffers import Buffer, copy_out
from common.config import Config, Weights
from common.snapshot import CHUNK_BYTES, SnapshotTransport
from common.sockets import Router
from common.stored import StoredVersion, write_version
from common.transfer import StoreTransport, Transport, join_group
from learner.publish import Publisher

MB = 1 << 20
TENSORS = [(f"layer.{i}", torch.randn(1024, 1024)) for i in range(77)]  # 323 MB
TOTAL = sum(t.nbytes for _, t in TENSORS)
REPEATS = 3


@contextlib.contextmanager
def child(*args: Any) -> Iterator[subprocess.Popen[str]]:
    """``benchmarks.weight_receiver`` with these arguments, once it has made its imports."""
    argv = [sys.executable, "-m", "benchmarks.weight_receiver", *map(str, args)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(10)


def seconds(action: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median, after one time that does not count (pages of memory come into being)."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def memcpy_s() -> float:
    """All tensors into one buffer that exists."""
    buffer = torch.zeros(TOTAL, dtype=torch.uint8)

    def copy() -> None:
        at = 0
        for _, t in TENSORS:
            buffer[at : at + t.nbytes].view(torch.float32).view(t.shape).copy_(t)
            at += t.nbytes

    return seconds(copy, 5)


def flat_s(num_receivers: int) -> float:
    """A flat gloo broadcast of the same bytes in buckets of 64 MB, and a barrier."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    buffer, bucket = torch.zeros(TOTAL, dtype=torch.uint8), 64 * MB
    with contextlib.ExitStack() as stack:
        for rank in range(1, num_receivers + 1):
            stack.enter_context(child("flat", store.port, rank, num_receivers + 1, TOTAL, bucket))
        group: Any = ProcessGroupGloo(PrefixStore("flat", store), 0, num_receivers + 1, timedelta(seconds=60))

        def broadcast() -> None:
            for start in range(0, TOTAL, bucket):
                group.broadcast(buffer[start : start + bucket], 0).wait()
            group.barrier().wait()

        return seconds(broadcast)


def update_s(num_receivers: int, digests: bool) -> tuple[float, float]:
    """(publish to held by all, of that the caller's stall)."""
    usual = Buffer.digest
    if not digests:
        Buffer.digest = lambda self, entry: 0  # type: ignore[method-assign]
    publisher = Publisher(run_id="run", epoch=1, config=Weights(bucket_bytes=64 * MB, timeout_s=60))
    version, stalls = -1, []

    def update() -> None:
        nonlocal version
        version += 1
        start = time.perf_counter()
        publisher.publish(version, TENSORS)
        stalls.append(time.perf_counter() - start)
        publisher.wait_held(version, timeout_s=60, minimum=num_receivers)

    try:
        with contextlib.ExitStack() as stack:
            for i in range(num_receivers):
                stack.enter_context(child("member", publisher.address, f"m{i}", "digests" if digests else "none"))
            update()  # as newcomers they pull a snapshot
            update()  # two buffers take turns
            return seconds(update), statistics.median(stalls[-REPEATS:])
    finally:
        publisher.close()
        Buffer.digest = usual  # type: ignore[method-assign]


@benchmark
def weights_update() -> Iterator[Figure]:
    """Full updates of 323 MB to one and two receivers, against a flat broadcast and against a copy in memory."""
    copy = memcpy_s()
    for n in (1, 2):
        flat = flat_s(n)
        bare, _ = update_s(n, digests=False)
        whole, stall = update_s(n, digests=True)
        yield Figure(f"weights.update_without_digests.{n}", bare / flat, "of a flat broadcast", "≤ 1.15")
        yield Figure(f"weights.update.{n}", whole / flat, "of a flat broadcast", "≤ 1.6")
        yield Figure(f"weights.update_in_copies.{n}", whole / copy, "copies in memory")
        yield Figure(f"weights.update_MB_per_s.{n}", n * TOTAL / whole / 1e6, "MB/s")
    yield Figure("weights.stall", stall / copy, "of one copy in memory", "≤ 1.5")


@benchmark
def weights_beside_steps() -> Iterator[Figure]:
    """Time of a step (matrix products of about 0.3 s) with a publication of 323 MB after each, against none."""
    a = torch.randn(1500, 1500)

    def step() -> None:
        end = 0
        while end < products:
            torch.mm(a, a)
            end += 1

    products = 1
    products = max(1, int(0.3 / seconds(step, 5)))
    alone = seconds(step, 8)
    publisher = Publisher(run_id="run", epoch=1, config=Weights(bucket_bytes=64 * MB, timeout_s=60))
    try:
        with child("member", publisher.address, "m", "digests"):
            version = -1

            def publishing_step() -> None:
                nonlocal version
                step()
                version += 1
                publisher.publish(version, TENSORS)

            publishing_step()
            publisher.wait_held(0, timeout_s=60)
            yield Figure("weights.step_with_publication", seconds(publishing_step, 8) / alone, "of a step without")
            yield Figure(
                "weights.published_beside_steps", publisher.stats()["weights/transfers"] / (version + 1), "held"
            )
    finally:
        publisher.close()


def sent_s(transport: Transport, buckets: list[torch.Tensor], plan: str) -> float:
    """Seconds from the first send until the receiver has everything."""
    ticket = transport.announce(1, 1)
    with child("take", ticket.transport, ticket.host, ticket.port, ticket.prefix, plan) as process:
        group = transport.open_group(ticket, 1)
        start = time.perf_counter()
        for b in buckets:
            group.send(b)
        assert process.stdout is not None and process.stdout.readline() == "done\n"
        taken = time.perf_counter() - start
        group.close()
        return taken


@benchmark
def weights_small_tensors() -> Iterator[Figure]:
    """300 tensors of 2.5 KB, 20 times: packed into one bucket, against one by one."""
    size, count, times = 2560, 300, 20
    transport = StoreTransport("127.0.0.1", timeout_s=60)
    single = [torch.zeros(size, dtype=torch.uint8)] * (count * times)
    packed = [torch.zeros(size * count, dtype=torch.uint8)] * times
    one_by_one = sent_s(transport, single, f"{size}*{len(single)}")
    ratio = one_by_one / sent_s(transport, packed, f"{size * count}*{times}")
    yield Figure("weights.packed_small_tensors", ratio, "times faster", "≥ 20")


@benchmark
def weights_snapshot() -> Iterator[Figure]:
    """A snapshot of 323 MB, against chunks of the same size over a bare ZeroMQ socket and against gloo."""
    buffer = torch.zeros(TOTAL, dtype=torch.uint8)
    buckets = [buffer[at : at + 16 * MB] for at in range(0, TOTAL, 16 * MB)]
    plan = ",".join(str(len(b)) for b in buckets)
    snapshot = statistics.median(
        sent_s(SnapshotTransport("127.0.0.1", timeout_s=60), buckets, plan) for _ in range(REPEATS)
    )
    gloo = statistics.median(sent_s(StoreTransport("127.0.0.1", timeout_s=60), buckets, plan) for _ in range(REPEATS))
    router = Router()
    data = buffer.numpy().data

    def bare() -> None:
        message = router.receive(60)
        assert message is not None
        for at in range(0, TOTAL, CHUNK_BYTES):
            router.send(message[0], [b""], data[at : at + CHUNK_BYTES])
        router.receive(60)

    with child("raw", router.address, TOTAL):
        raw = seconds(bare)
    router.close()
    yield Figure("weights.snapshot_MB_per_s", TOTAL / snapshot / 1e6, "MB/s")
    yield Figure("weights.snapshot", snapshot / raw, "of bare ZeroMQ")
    yield Figure("weights.snapshot_to_gloo", snapshot / gloo, "of gloo, same buckets")


@benchmark
def weights_stored() -> Iterator[Figure]:
    """A version of 323 MB written as a folder, SHA-256 included, and read from it (the file system's cache is warm)."""
    buffer, into = Buffer(), Buffer()
    layout = copy_out(TENSORS, buffer, bucket_bytes=16 * MB)
    into.prepare(layout)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0"

        def write() -> None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            write_version(path, buffer, 0)

        def read() -> None:
            stored = StoredVersion(path, layout)
            for index in range(layout.num_buckets):
                stored.read(layout.bucket(index).start, into.bucket(index).numpy().data)
            stored.close()

        copy = memcpy_s()
        yield Figure("weights.stored_write", seconds(write) / copy, "copies in memory")
        yield Figure("weights.stored_read", seconds(read) / copy, "copies in memory")
    assert torch.equal(into.bytes, buffer.bytes)


@benchmark
def weights_groups() -> Iterator[Figure]:
    """Time until 3, 8 and 32 engines each have a group with the learner and one small bucket over it."""
    for count in (3, 8, 32):
        transport = StoreTransport("127.0.0.1", timeout_s=30)
        bucket = torch.zeros(64, dtype=torch.uint8)

        def form(transport: StoreTransport = transport, count: int = count, bucket: torch.Tensor = bucket) -> None:
            tickets = [transport.announce(1, n) for n in range(count)]
            groups: list[Any] = []

            def join(ticket: Any) -> None:
                group = join_group(ticket, rank=1, world_size=2, timeout_s=30)
                group.receive(torch.zeros_like(bucket))
                groups.append(group)

            def lead(ticket: Any) -> None:
                group = transport.open_group(ticket, 1)
                group.send(bucket)
                groups.append(group)

            threads = [threading.Thread(target=f, args=(t,)) for t in tickets for f in (join, lead)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert len(groups) == 2 * count
            for group in groups:
                group.close()

        yield Figure(f"weights.form_groups_ms.{count}", 1000 * seconds(form), "ms")
        transport.close()


@benchmark
def weights_swaps() -> Iterator[Figure]:
    """Real vLLM, tiny model, 64 requests at a time: what one publication a second costs its sampling."""
    from generators.engine import Engine
    from generators.member import Member
    from tests import models

    weights = Weights(timeout_s=30)
    config = Config.model_validate(
        {
            "model": {"toy": True, "dtype": "float32"},
            "data": {"max_prompt_length": 64, "max_response_length": 128},
            "rollout": {"max_num_seqs": 64},
            "weights": weights.model_dump(),
        }
    )
    model = models.tiny_model(1)
    tokens = 0

    async def sample_for_ever(engine: Any, lane: int) -> None:
        nonlocal tokens
        for n in range(1 << 30):
            done = await engine.generate(
                models.token_ids("reverse 48213="), temperature=1.0, top_p=1.0, top_k=-1, max_tokens=128,
                request_id=f"{lane}.{n}",
            )  # fmt: skip
            tokens += len(done.response_ids)

    async def measure(folder: str) -> tuple[float, float]:
        path = str(models.write_folder(Path(folder) / "model"))
        engine = await Engine.start(model_path=path, config=config, seed=1)
        publisher = Publisher(run_id="run", epoch=1, config=weights)
        member = Member(
            engine=engine, run_id="run", name="a", incarnation="1", lookup_address=lambda: publisher.address
        )
        work = [asyncio.create_task(member.run())]
        version, pauses, rates = 0, 0.0, {True: [0.0, 0.0], False: [0.0, 0.0]}
        publisher.publish(0, model.named_parameters())
        await asyncio.to_thread(publisher.wait_held, 0, timeout_s=60)
        work += [asyncio.create_task(sample_for_ever(engine, lane)) for lane in range(64)]
        await asyncio.sleep(3)  # until the lanes are out of step
        for second in range(16):
            publishing = second % 2 == 1
            before, start = tokens, time.perf_counter()
            if publishing:
                version += 1
                publisher.publish(version, model.named_parameters())
                await asyncio.to_thread(publisher.wait_held, version, timeout_s=60)
                pauses += publisher.stats()["weights/pause_s"]
            await asyncio.sleep(max(0.0, start + 1 - time.perf_counter()))
            rates[publishing][0] += tokens - before
            rates[publishing][1] += time.perf_counter() - start
        for task in work:
            task.cancel()
        await engine.close()
        publisher.close()
        share = pauses / rates[True][1]
        return share, 1 - (rates[True][0] / rates[True][1]) / (rates[False][0] / rates[False][1])

    with tempfile.TemporaryDirectory() as folder:
        share, lost = asyncio.run(measure(folder))
    yield Figure("weights.pause_share", share, "of decode time", "≤ 0.1")
    yield Figure("weights.tokens_lost_to_swaps", lost, "of tokens, the new KV included", "≤ 0.1")
