"""The real engine: weights pushed into vLLM give the log-probs that Hugging Face gives for them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config import Config, Weights
from common.errors import DeadlineError, EngineError
from common.model_files import FileServer, list_files
from generators.engine import Engine
from generators.member import Member
from generators.requests import Completion
from learner.canary import CanaryForward
from learner.publish import Publisher
from tests import models
from tests.system.test_publish import until

pytestmark = pytest.mark.engine

PROMPT = models.token_ids("reverse 48213=")
WEIGHTS = Weights(bucket_bytes=1 << 17, timeout_s=3.0)  # nine buckets
CONFIG = Config.model_validate(
    {
        "model": {"toy": True, "dtype": "float32"},
        "data": {"max_prompt_length": 64, "max_response_length": 300},
        "rollout": {"max_num_seqs": 64},
        "weights": WEIGHTS.model_dump(),
    }
)


class Bench:
    """An engine and its membership in a loop of their own thread; the publisher is used from the test."""

    def __init__(
        self, folder: Path, weights: Weights = WEIGHTS, config: Config = CONFIG, *, first: int | None = None
    ) -> None:
        """first: seed of the model that is published before the engine starts."""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.folder = folder
        self.notes: list[str] = []
        self._num_joins = 0
        model = models.write_folder(folder / "model")
        self.publisher = Publisher(
            run_id="run", epoch=1, config=weights, on_event=self.notes.append,
            files=FileServer(model, list_files(model)), folder=folder / "weights",
        )  # fmt: skip
        self.publisher.prove_with(CanaryForward(models.tiny_model(), dtype="float32", max_tokens=100))
        self.version = -1
        if first is not None:
            self.version = 0
            self.publisher.publish(0, models.tiny_model(first).named_parameters())
        start = time.monotonic()
        self.engine: Engine = self.run(Engine.start(model_path=str(model), config=config, seed=1), 240)
        self.start_s = time.monotonic() - start
        self.member = self.run(self._join())
        self.task = asyncio.run_coroutine_threadsafe(self.member.run(), self.loop)
        self._num_requests = 0

    async def _join(self) -> Member:
        self._num_joins += 1
        return Member(
            engine=self.engine, run_id="run", name="a", incarnation=str(self._num_joins),
            lookup_address=lambda: self.publisher.address,
        )  # fmt: skip

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def push(self, seed: int, *, wait: bool = True) -> Any:
        """Publish the random model of ``seed`` as the next version; returns the model."""
        model = models.tiny_model(seed)
        self.version += 1
        self.publisher.publish(self.version, model.named_parameters())
        if wait:
            self.publisher.wait_held(self.version, timeout_s=20)
        if self.task.done():
            self.task.result()
        return model

    async def sample(self, max_tokens: int, *, temperature: float = 1.0, prompt: list[int] = PROMPT) -> Completion:
        self._num_requests += 1
        return await self.engine.generate(
            prompt,
            temperature=temperature,
            top_p=1.0,
            top_k=-1,
            max_tokens=max_tokens,
            request_id=f"r{self._num_requests}",
        )

    async def sample_many(self, count: int, max_tokens: int) -> list[Completion]:
        return list(await asyncio.gather(*(self.sample(max_tokens) for _ in range(count))))

    def close(self) -> None:
        self.task.cancel()
        self.run(self.engine.close())
        self.publisher.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    b = Bench(tmp_path_factory.mktemp("engine"))
    yield b
    b.close()


def largest_difference(model: Any, completion: Completion, span: tuple[int, int] | None = None) -> float:
    """Between the engine's log-probs and Hugging Face's with ``model``, over the tokens of ``span``."""
    start, end = span or (0, len(completion.response_ids))
    wanted = models.logprobs_of(model, PROMPT, completion.response_ids)[start:end]
    return max(abs(a - b) for a, b in zip(completion.logprobs[start:end], wanted, strict=True))


def test_before_the_first_weights_nothing_that_is_sampled_counts(bench: Bench) -> None:
    assert bench.engine.version == -1
    with pytest.raises(EngineError, match="stamped"):
        bench.run(bench.sample(4))


def test_pushed_weights_give_hugging_faces_logprobs(bench: Bench) -> None:
    for seed in (1, 2):
        model = bench.push(seed)
        for completion in bench.run(bench.sample_many(8, 40)):
            assert completion.spans == [(bench.version, 0, len(completion.response_ids))]
            assert largest_difference(model, completion) < 1e-4
    assert 0 <= bench.publisher.stats()["weights/canary_difference"] < 1e-4  # the first load was proven


def test_temperature_and_ends(bench: Bench) -> None:
    model = bench.push(3)
    cold = bench.run(bench.sample(30, temperature=0.5))
    wanted = models.logprobs_of(model, PROMPT, cold.response_ids, temperature=0.5)
    assert max(abs(a - b) for a, b in zip(cold.logprobs, wanted, strict=True)) < 1e-4
    ends = {c.finish_reason: c for c in bench.run(bench.sample_many(64, 300))}
    assert ends["stop"].response_ids[-1] == models.EOS  # the end token is part of the response
    greedy = [bench.run(bench.sample(12, temperature=0.0)).response_ids for _ in range(2)]
    assert greedy[0] == greedy[1]


def test_the_prefix_cache_does_not_outlive_the_weights(bench: Bench) -> None:
    prompt = (PROMPT * 15)[:200]  # more than one block of the cache
    for seed in (4, 5):
        model = bench.push(seed)
        for _ in range(2):  # the second one may use the cache
            completion = bench.run(bench.sample(8, prompt=prompt))
            wanted = models.logprobs_of(model, prompt, completion.response_ids)
            assert max(abs(a - b) for a, b in zip(completion.logprobs, wanted, strict=True)) < 1e-4


def test_a_cancelled_and_an_impossible_request(bench: Bench) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(bench.sample(300))
        while not bench.engine._running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bench.engine._running

    bench.run(cancel())
    with pytest.raises(EngineError, match="longer than the maximum"):
        bench.run(bench.sample(5, prompt=PROMPT * 50))
    assert bench.run(bench.sample(3)).response_ids  # it goes on


def test_requests_in_flight_go_on_with_the_new_weights(bench: Bench) -> None:
    pushed = {bench.version + 1 + i: 10 + i for i in range(4)}
    running = asyncio.run_coroutine_threadsafe(bench.sample_many(64, 300), bench.loop)
    by_version = {}
    for version, seed in pushed.items():
        by_version[version] = bench.push(seed)
    completions = running.result(60)
    mixed = [c for c in completions if len(c.spans) > 1]
    assert mixed, "no request saw two versions"
    for c in completions:
        assert [v for v, _, _ in c.spans] == sorted({v for v, _, _ in c.spans})
        for version, start, end in c.spans:
            if version in by_version:
                assert largest_difference(by_version[version], c, (start, end)) < 1e-4
    version, start, end = mixed[0].spans[-1]
    other = next(v for v in by_version if v != version)
    assert largest_difference(by_version[other], mixed[0], (start, end)) > 0.1  # the comparison can tell versions apart
    assert bench.publisher.stats()["weights/pause_s"] < 1.0


def test_a_torn_transfer_changes_nothing(bench: Bench) -> None:
    model = bench.push(20)
    held = bench.version
    asked = []

    async def tear() -> None:
        """Stage half a version: the learner's end closes after three buckets."""
        from common.buffers import Buffer, copy_out
        from common.transfer import StoreTransport
        from common.weights import encode_manifest

        buffer = Buffer()
        manifest = copy_out(models.tiny_model(21).named_parameters(), buffer, bucket_bytes=WEIGHTS.bucket_bytes)
        rendezvous = StoreTransport("127.0.0.1", timeout_s=3)
        ticket = rendezvous.announce(1, 99)
        await bench.engine.stage(
            number=99, version=held + 1, manifest=encode_manifest(manifest), rank=1, world_size=2,
            ticket=[ticket.transport, ticket.host, ticket.port, ticket.prefix], timeout_s=3.0,
            on_ready=lambda: asked.append(-1),
        )  # fmt: skip
        group = await asyncio.to_thread(rendezvous.open_group, ticket, 1)
        for index in range(3):
            asked.append(index)
            await asyncio.to_thread(group.send, buffer.bucket(index))
        group.close()
        with pytest.raises(EngineError, match="is not staged here"):
            await bench.engine.swap(held + 1)

    bench.run(tear())
    assert asked == [-1, 0, 1, 2] and not bench.engine.dead
    completion = bench.run(bench.sample(40))
    assert completion.spans == [(held, 0, len(completion.response_ids))]
    assert largest_difference(model, completion) < 1e-4
    later = bench.push(22)  # and the next one arrives
    assert largest_difference(later, bench.run(bench.sample(40))) < 1e-4


@pytest.mark.soak
def test_a_frozen_engine_process_is_named_and_catches_up(bench: Bench) -> None:
    (core,) = [p for p in psutil.Process().children() if "EngineCore" in " ".join(p.cmdline())]
    core.suspend()
    try:
        model = bench.push(30, wait=False)
        with pytest.raises(DeadlineError, match=r"a \(holds"):
            bench.publisher.wait_held(bench.version, timeout_s=2 * WEIGHTS.timeout_s)
    finally:
        core.resume()
    bench.publisher.wait_held(bench.version, timeout_s=2 * WEIGHTS.timeout_s)
    assert largest_difference(model, bench.run(bench.sample(20))) < 1e-4


def test_versions_only_rise(bench: Bench) -> None:
    bench.push(23)
    with pytest.raises(EngineError, match="not above"):
        bench.run(bench.engine.swap(bench.version))
    assert not bench.engine.dead


def test_all_sockets_are_on_loopback(bench: Bench) -> None:
    me = psutil.Process()
    listening = [
        (p.pid, c.laddr)
        for p in [me, *me.children(recursive=True)]
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for _, address in listening} <= {"127.0.0.1", "::1"}


# ---------------------------------------------------------------- engines of their own
@pytest.mark.soak
def test_tokens_on_stale_keys_and_values_are_stamped_by_the_older_version(tmp_path: Path) -> None:
    """`rollout.recompute_kv=false`: requests in flight keep the KV of the weights that made it."""
    tree = CONFIG.model_dump()
    tree["rollout"]["recompute_kv"] = False
    b = Bench(tmp_path, config=Config.model_validate(tree))
    try:
        before = b.push(1)
        running = asyncio.run_coroutine_threadsafe(b.sample_many(64, 300), b.loop)
        until(lambda: len(b.engine._running) == 64, 10, "the requests")
        after = b.push(2)
        completions = running.result(60)
        ends = {len(c.response_ids): c for c in completions}
        longest = ends[max(ends)]
        for c in completions:
            assert c.spans == [(0, 0, len(c.response_ids))]  # never the new version's, whose KV they do not have
        tail = (len(longest.response_ids) - 20, len(longest.response_ids))
        assert largest_difference(before, longest, (0, 3)) < 1e-4
        assert largest_difference(after, longest, tail) > 1e-3  # neither the one
        assert largest_difference(before, longest, tail) > 1e-3  # nor the other
        fresh = b.run(b.sample(20))
        assert fresh.spans == [(1, 0, len(fresh.response_ids))] and largest_difference(after, fresh) < 1e-4
    finally:
        b.close()


START = """
import asyncio, sys
from common.config import Config
from generators.engine import Engine
from tests.system.test_engine import CONFIG

async def main():
    print("starting", flush=True)
    engine = await Engine.start(model_path=sys.argv[1], config=CONFIG, seed=1)
    print("started", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("moment", [pytest.param("while it starts", marks=pytest.mark.soak), "while it runs"])
def test_the_engine_dies_with_its_generator(tmp_path: Path, moment: str) -> None:
    folder = models.write_folder(tmp_path / "model")
    script = tmp_path / "start.py"
    script.write_text(START)
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(script), str(folder)], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "starting\n"
        me = psutil.Process(process.pid)
        if moment == "while it runs":
            assert process.stdout.readline() == "started\n"
        else:
            deadline = time.monotonic() + 60
            while len(me.children()) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)  # resource tracker and EngineCore
        children = me.children(recursive=True)
        assert len(children) >= 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    _, alive = psutil.wait_procs(children, timeout=90)  # one that still imports sees it only then
    assert not alive
