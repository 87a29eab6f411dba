"""Real vLLM that loads something else than what was sent: the canary sees it, and no sample of it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from common.errors import EngineError
from tests import models
from tests.system.test_engine import PROMPT, WEIGHTS, Bench, largest_difference
from tests.system.test_publish import until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    import generators.starting

    usual = generators.starting.engine_args
    faulty = {"worker_extension_cls": "tests.faulty_worker.WorkerExtension"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators.starting, "engine_args", lambda *args: usual(*args) | faulty)
        b = Bench(tmp_path_factory.mktemp("canary"), WEIGHTS.model_copy(update={"canary_every": 1}))
    yield b
    b.close()


def set_fault(bench: Bench, fault: str | None) -> None:
    bench.run(bench.engine.rpc("set_fault", fault=fault))


def wait_note(bench: Bench, text: str, since: int) -> str:
    return until(lambda: next((n for n in bench.notes[since:] if text in n), None), 20, f"a note with {text!r}")


@pytest.mark.parametrize("fault", ["stale_head", "swapped_names", "flipped_bit", "perturbed", "other_dtype"])
def test_what_is_loaded_wrong_is_refused_by_its_difference(bench: Bench, fault: str) -> None:
    bench.push(1)
    set_fault(bench, fault)
    since = len(bench.notes)
    running = asyncio.run_coroutine_threadsafe(bench.sample_many(8, 200), bench.loop)
    model = bench.push(2, wait=False)
    note = wait_note(bench, "canary: its log-probs differ from those of the weights sent by", since)
    assert note.startswith("a: ") and "at most 0.0001 in float32" in note
    assert bench.engine.version == -1 or bench.engine.version == bench.version
    set_fault(bench, None)
    bench.publisher.wait_held(bench.version, timeout_s=20)  # sent again, proven, held
    for completion in [*running.result(60), *bench.run(bench.sample_many(2, 20))]:
        version, start, end = completion.spans[-1]
        assert version in (bench.version, bench.version - 1)
        if version == bench.version:  # nothing that the wrong weights have made has left
            assert largest_difference(model, completion, (start, end)) < 1e-4
    assert bench.publisher.stats()["weights/canary_difference"] < 1e-4


def test_a_canary_goes_before_those_that_wait_for_a_seat(bench: Bench) -> None:
    model = bench.push(3)
    running = asyncio.run_coroutine_threadsafe(bench.sample_many(200, 100), bench.loop)  # 64 seats
    until(lambda: len(bench.engine._running) == 200, 10, "the requests")
    wanted = models.logprobs_of(model, PROMPT[:4], PROMPT[4:])
    measured = bench.run(bench.engine.prompt_logprobs(tuple(PROMPT)))[3:]
    assert max(abs(a - b) for a, b in zip(measured, wanted, strict=True)) < 1e-4
    assert not running.done() and len(bench.engine._running) > 64
    running.result(60)


def test_who_always_computes_something_else_is_sent_away_by_name(bench: Bench) -> None:
    set_fault(bench, "perturbed")
    since = len(bench.notes)
    bench.push(4, wait=False)
    with pytest.raises(EngineError, match="does not compute what the learner does, after 3 loads: canary"):
        bench.task.result(30)
    assert "a is sent away after 3 loads" in wait_note(bench, "sent away", since)
    assert bench.engine.version == -1 and not bench.engine.dead
    bench.task = asyncio.run_coroutine_threadsafe(bench.run(bench._join()).run(), bench.loop)
    set_fault(bench, None)
    bench.publisher.wait_held(bench.version, timeout_s=20)  # as a newcomer


def test_a_layer_that_does_not_come_ends_the_engine_by_its_names(bench: Bench) -> None:
    set_fault(bench, "missing_layer")
    bench.push(5, wait=False)
    with pytest.raises(EngineError, match=r"tensors that were not sent: .*layers\.1\."):
        bench.task.result(30)
    assert bench.engine.dead
