"""Real vLLM without staging: versions are loaded as they come, and what tears leaves an engine that holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import generators.starting
from common.buffers import Buffer, copy_out, pack_digests, with_digests
from common.config import Config
from common.errors import EngineError, OtherModelError, WeightError
from common.transfer import StoreTransport
from common.weights import encode_manifest
from tests import models
from tests.system.test_engine import CONFIG, WEIGHTS, Bench, largest_difference
from tests.system.test_publish import until

pytestmark = pytest.mark.engine
NONE = WEIGHTS.model_copy(update={"staging": "none"})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    config = Config.model_validate({**CONFIG.model_dump(), "weights": NONE.model_dump()})
    usual = generators.starting.engine_args
    faulty = {"worker_extension_cls": "tests.faulty_worker.WorkerExtension"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators.starting, "engine_args", lambda *args: usual(*args) | faulty)
        b = Bench(tmp_path_factory.mktemp("none"), NONE, config)
    yield b
    b.close()


def send_by_hand(bench: Bench, seed: int, *, buckets: int | None = None, wrong: str = "") -> None:
    """A transfer of the test's own to the engine; raises what `stage` raises.

    Args:
        buckets: close after so many; None: send all.
        wrong: tensor whose digest is sent wrong.
    """

    async def transfer() -> None:
        buffer = Buffer()
        manifest = copy_out(models.tiny_model(seed).named_parameters(), buffer, bucket_bytes=NONE.bucket_bytes)
        digests = pack_digests(with_digests(buffer))
        index = [e.name for e in manifest.entries].index(wrong or "model.norm.weight")
        digests[8 * index] ^= 1 if wrong else 0
        rendezvous = StoreTransport("127.0.0.1", timeout_s=3)
        ticket = rendezvous.announce(1, 99)
        ready = asyncio.Event()
        staging = asyncio.create_task(
            bench.engine.stage(
                number=99, version=bench.version + 1, manifest=encode_manifest(manifest), rank=1, world_size=2,
                ticket=[ticket.transport, ticket.host, ticket.port, ticket.prefix], timeout_s=3.0, on_ready=ready.set,
            )
        )  # fmt: skip
        await asyncio.wait_for(ready.wait(), 10)
        group = await asyncio.to_thread(rendezvous.open_group, ticket, 1)
        for i in range(manifest.num_buckets if buckets is None else buckets):
            await asyncio.to_thread(group.send, buffer.bucket(i))
        if buckets is None:
            await asyncio.to_thread(group.send, digests)
        else:
            group.close()
        await staging

    bench.run(transfer())


def test_each_version_is_loaded_as_it_comes(bench: Bench) -> None:
    for seed in (1, 2):
        model = bench.push(seed)
        for c in bench.run(bench.sample_many(4, 40)):
            assert c.spans == [(bench.version, 0, len(c.response_ids))] and largest_difference(model, c) < 1e-4
    assert 0 < bench.publisher.stats()["weights/pause_s"] < 10
    assert 0 <= bench.publisher.stats()["weights/canary_difference"] < 1e-4


def test_a_transfer_that_brings_nothing_changes_nothing(bench: Bench) -> None:
    model = bench.push(3)
    with pytest.raises(WeightError, match=r"bucket 0 of \d+: "):
        send_by_hand(bench, 4, buckets=0)
    assert bench.engine.version == bench.version
    c = bench.run(bench.sample(20))
    assert c.spans == [(bench.version, 0, len(c.response_ids))] and largest_difference(model, c) < 1e-4


@pytest.mark.parametrize(("buckets", "wrong"), [(4, ""), (None, "model.layers.1.mlp.down_proj.weight")])
def test_a_torn_load_holds_nothing_and_no_sample_of_it_leaves(bench: Bench, buckets: int | None, wrong: str) -> None:
    bench.push(5)
    running = asyncio.run_coroutine_threadsafe(bench.sample_many(16, 300), bench.loop)
    until(lambda: len(bench.engine._running) == 16, 10, "the requests")
    says = f"tensor {wrong}: the bytes received" if wrong else "bucket 4 of"
    with pytest.raises(WeightError, match=f"{says}.*; the engine holds nothing until the next"):
        send_by_hand(bench, 6, buckets=buckets, wrong=wrong)
    assert bench.engine.version == -1 and not bench.engine.dead
    later = asyncio.run_coroutine_threadsafe(bench.sample(10), bench.loop)  # comes while there is nothing
    assert not later.done()
    model = bench.push(7)
    for c in [*running.result(60), later.result(60)]:
        if c.spans[0][0] == bench.version:  # the others had ended before
            assert largest_difference(model, c) < 1e-4
        assert [v for v, _, _ in c.spans] in ([bench.version], [bench.version - 1])
    assert later.result().spans[0][0] == bench.version


def test_another_model_is_refused_by_tensor_name_on_both_sides(bench: Bench) -> None:
    """The engine knows its model's tensors from its config, before the first version comes."""
    (plan,) = bench.run(bench.engine.rpc("plan_staging", staging="none", shared=""))  # as if it had just started
    model = models.tiny_model(8)
    assert plan[:2] == ["planned", sum(p.nbytes for p in model.parameters())]

    def refuses(other: Any) -> str:
        manifest = encode_manifest(copy_out(other.named_parameters(), Buffer(), bucket_bytes=NONE.bucket_bytes))
        with pytest.raises(OtherModelError) as error:
            bench.run(bench.engine.stage(on_ready=lambda: None, number=1, version=99, manifest=manifest))
        return str(error.value)

    assert refuses(models.tiny_model(intermediate_size=512)) == (
        "tensor model.layers.0.mlp.gate_proj.weight: the learner sends [512, 128], this engine's model has [256, 128]"
    )
    assert "tensor model.embed_tokens.weight: the learner sends [50, " in refuses(models.tiny_model(vocab_size=50))
    assert "model.layers.1." in refuses(models.tiny_model(num_hidden_layers=1))
    assert "tensor lm_head.weight: " in refuses(models.tiny_model(tie_word_embeddings=False))
    since = len(bench.notes)
    bench.version += 1
    bench.publisher.publish(bench.version, models.tiny_model(intermediate_size=512).named_parameters())
    note = until(lambda: next((n for n in bench.notes[since:] if "gate_proj" in n), None), 10, "the learner's note")
    assert note.startswith(f"a: version {bench.version} not delivered: it says: tensor model.layers.0.mlp.gate_proj")
    with pytest.raises(OtherModelError, match="start this generator with the learner's config and model"):
        bench.task.result(10)
    bench.version += 1
    bench.publisher.publish(bench.version, model.named_parameters())  # the right one again
    bench.task = asyncio.run_coroutine_threadsafe(bench.run(bench._join()).run(), bench.loop)
    bench.publisher.wait_held(bench.version, timeout_s=20)
    assert largest_difference(model, bench.run(bench.sample(20))) < 1e-4


def test_a_layer_that_does_not_come_ends_the_engine_by_its_names(bench: Bench) -> None:
    """Sent again it would lack the same, and each time the engine would pause."""
    bench.run(bench.engine.rpc("set_fault", fault="missing_layer"))
    bench.push(9, wait=False)
    with pytest.raises(EngineError, match=r"tensors that were not sent: .*layers\.1\."):
        bench.task.result(30)
    assert bench.engine.dead
