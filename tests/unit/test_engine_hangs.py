"""The engine's waits on its child, which here is a fake that stops answering."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.canary import Canary
from common.config import Config
from common.errors import ConfigError, DisprovedError, EngineError, RequestCancelled, WeightError
from common.logs import LOGGER
from generators.engine import Engine

CONFIG = Config.model_validate({"model": {"toy": True}, "weights": {"timeout_s": 0.05}})
CANARY = Canary((3, 4, 5), (-1.0, -2.0), "float32")


class Child:
    """vLLM's front, as far as the engine uses it; ``hangs`` names the call that is never answered."""

    def __init__(self, hangs: str = "") -> None:
        self.hangs, self.ended, self.errored, self.output_handler = hangs, False, False, None
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._call("pause"),
            set_weight_version_async=self._call("set_weight_version"),
            resume_scheduler_async=self._call("resume"),
        )
        self.collective_rpc, self.abort = self._call("rpc", [None]), self._call("abort")
        self.output_processor = SimpleNamespace(propagate_error=lambda e: None)

    def _call(self, name: str, answer: Any = None) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == self.hangs:
                await asyncio.Event().wait()
            return answer

        return call

    def shutdown(self, timeout_s: float) -> None:
        self.ended = True


def make_engine(child: Child, folder: Path, config: Config = CONFIG) -> Engine:
    return Engine(child, folder, SimpleNamespace(close=lambda: None), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("hangs", ["pause", "rpc", "set_weight_version", "resume"])
def test_a_child_that_does_not_answer_a_swap_ends_the_engine(hangs: str, tmp_path: Path) -> None:
    async def swap() -> None:
        child = Child(hangs)
        engine = make_engine(child, tmp_path)
        with pytest.raises(EngineError, match=r"the engine has not answered for 0\.2 s; it hangs"):
            await asyncio.wait_for(engine.swap(1), 5)
        assert engine.dead and child.ended

    asyncio.run(swap())


def test_a_child_that_does_not_answer_while_it_stages_counts_as_dead(tmp_path: Path) -> None:
    async def stage() -> None:
        engine = make_engine(Child("rpc"), tmp_path)
        with pytest.raises(EngineError, match="stage: the engine has not answered"):
            await asyncio.wait_for(engine.rpc("stage"), 5)
        assert engine.dead

    asyncio.run(stage())


def test_an_engine_that_has_ended_says_where_its_last_words_are(tmp_path: Path) -> None:
    async def stage() -> None:
        child = Child()

        async def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")

        child.collective_rpc, child.errored = fail, True
        with pytest.raises(EngineError, match=r"stage: the engine's process ended.*logs/generators\.out"):
            await make_engine(child, tmp_path).rpc("stage")
        child.errored = False
        with pytest.raises(EngineError, match="stage: RuntimeError: EngineCore"):
            await make_engine(child, tmp_path).rpc("stage")

    asyncio.run(stage())


@pytest.mark.parametrize(
    "error", [EngineError("no log-probs"), ValueError("too long"), IndexError(3), DisprovedError(1.0, "canary: other")]
)
def test_a_proof_that_fails_in_any_way_is_a_disproof(error: Exception, tmp_path: Path) -> None:
    async def swap() -> None:
        engine = make_engine(Child(), tmp_path)

        async def fail(ids: tuple[int, ...]) -> list[float]:
            raise error

        async def succeed(ids: tuple[int, ...]) -> list[float]:
            return [-1.0, -2.0]

        engine.prompt_logprobs = fail  # type: ignore[method-assign]
        with pytest.raises(DisprovedError, match="canary"):
            await engine.swap(1, CANARY)
        assert engine.version == -1 and not engine.dead
        engine.prompt_logprobs = succeed  # type: ignore[method-assign]
        await engine.swap(2, CANARY)
        assert engine.version == 2 and engine._trusted.is_set()  # what was held back may leave

    asyncio.run(swap())


def test_a_proof_that_comes_too_late_proves_nothing(tmp_path: Path) -> None:
    async def swap() -> None:
        engine = make_engine(Child(), tmp_path)

        async def wait(ids: tuple[int, ...]) -> list[float]:
            await asyncio.Event().wait()
            raise AssertionError

        engine.prompt_logprobs = wait  # type: ignore[method-assign]
        with pytest.raises(WeightError, match=r"no log-probs within 0\.05 s") as error:
            await engine.swap(1, CANARY, 0.05)
        assert not isinstance(error.value, DisprovedError)  # three of which send an engine away
        assert engine.version == -1 and not engine.dead and not engine._trusted.is_set()

    asyncio.run(swap())


@pytest.mark.parametrize("where", ["before it is sampled", "while it is proven", "after it was disproved"])
def test_a_request_that_waits_for_a_trusted_load_can_be_cancelled(where: str, tmp_path: Path) -> None:
    async def cancel() -> None:
        engine = make_engine(Child(), tmp_path)
        sampled = asyncio.Event()

        async def sample(*args: Any) -> Any:
            assert not sampled.is_set(), "it was sampled again"
            sampled.set()
            engine._trusted.clear()
            if where == "after it was disproved":
                await engine._distrust()
                raise RequestCancelled("vLLM has aborted it")

        engine._sample = sample  # type: ignore[method-assign]
        if where == "before it is sampled":
            engine._trusted.clear()
            sampled.set()
        else:
            engine.version = 1
        request = asyncio.create_task(
            engine.generate([3], temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, request_id="r")
        )
        await asyncio.sleep(0)
        await asyncio.wait_for(sampled.wait(), 5)
        assert list(engine._running) == ["r"]
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(request, 5)
        assert not engine._running and not engine._trusted.is_set()

    asyncio.run(cancel())


def test_adapters_that_vllm_does_not_compute_end_the_engine_for_good(tmp_path: Path) -> None:
    child = Child()
    child.collective_rpc = child._call("rpc", [["refused", "no adapter beside model.layers.0.mixer.in_proj", None]])

    async def plan() -> None:
        await make_engine(child, tmp_path)._plan_staging()

    with pytest.raises(ConfigError, match="no adapter beside") as error:
        asyncio.run(plan())
    assert error.value.exit_code == 2  # a restart would not mend it


@pytest.mark.parametrize(
    ("staging", "says"),
    [
        ("host", r"staging=host: a version takes 3\.1 GB of host memory, 2 GB are free\. .*staging=device or none"),
        ("device", r"staging=device: a version takes 3\.1 GB of device memory of each worker, 2 GB.*staging=none"),
        ("none", ""),
    ],
)
def test_a_version_that_will_not_fit_ends_the_engine_at_its_start(
    staging: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"model": {"toy": True}, "weights": {"staging": staging}})

    async def plan(size: int | None, free: int | None) -> None:
        child = Child()
        child.collective_rpc = child._call("rpc", [["planned", size, free]])
        await make_engine(child, tmp_path, config)._plan_staging()

    asyncio.run(plan(3_100_000_000, 3_100_000_000))
    if says:
        with pytest.raises(EngineError, match=says) as error:
            asyncio.run(plan(3_100_000_000, 2_000_000_000))
        assert error.value.exit_code == 1  # started again: the memory may be free then
    else:
        asyncio.run(plan(3_100_000_000, 2_000_000_000))
    caplog.clear()
    with caplog.at_level("INFO", logger=LOGGER):
        asyncio.run(plan(None, 2_000_000_000))
        asyncio.run(plan(3_100_000_000, None))
    texts = [r.getMessage() for r in caplog.records]
    assert "an unknown number of bytes" in texts[0] and "3.1 GB" in texts[1] and len(texts) == 2
