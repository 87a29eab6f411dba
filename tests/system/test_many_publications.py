"""Real vLLM: many versions to several engines while requests run; each token is the stamped version's."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from generators.engine import Engine
from generators.member import Member
from generators.requests import Completion
from learner.canary import CanaryForward
from learner.publish import Publisher
from tests import models
from tests.system.test_engine import CONFIG, PROMPT, WEIGHTS, largest_difference

pytestmark = pytest.mark.engine
STAGINGS = ("device", "none", "host")  # of the first engine, the second, the third
LANES, MAX_TOKENS, CHECKED = 16, 200, 60


class Lane:
    """One engine's requests, one after the other, for as long as the test lasts."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.done, self.held = engine, [], []  # type: ignore[var-annotated]

    async def sample_for_ever(self, number: int) -> None:
        for n in range(1 << 30):
            completion = await self.engine.generate(
                PROMPT, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=MAX_TOKENS, request_id=f"{number}.{n}"
            )
            self.done.append(completion)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    yield made
    made.call_soon_threadsafe(made.stop)


@pytest.mark.parametrize(("publications", "count"), [(20, 2), pytest.param(200, 3, marks=pytest.mark.soak)])
def test_no_token_is_of_another_version_than_it_says(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, publications: int, count: int
) -> None:
    def run(work: Coroutine[Any, Any, Any], timeout_s: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)

    async def start(name: str) -> tuple[Lane, list[asyncio.Task[None]]]:
        staging = STAGINGS[(len(name) - 1) % count]
        tree = {**CONFIG.model_dump(), "weights": {**WEIGHTS.model_dump(), "staging": staging}}
        engine = await Engine.start(model_path=folder, config=Config.model_validate(tree), seed=len(name))
        lane = Lane(engine)
        member = Member(
            engine=engine, run_id="run", name=name, incarnation="1", lookup_address=lambda: publisher.address,
            on_version=lane.held.append,
        )  # fmt: skip
        return lane, [asyncio.create_task(member.run())]

    async def begin() -> None:
        for lane, tasks in started:
            tasks += [asyncio.create_task(lane.sample_for_ever(i)) for i in range(LANES)]

    async def end() -> None:
        for lane, tasks in started:
            for task in tasks:
                assert not task.done() or not task.exception(), task.exception()  # no request failed
                task.cancel()
            await lane.engine.close()

    folder = str(models.write_folder(tmp_path / "model"))
    publisher = Publisher(run_id="run", epoch=1, config=WEIGHTS.model_copy(update={"canary_every": 10}))
    publisher.prove_with(CanaryForward(models.tiny_model(), dtype="float32", max_tokens=100))
    started = [run(start("e" * (i + 1))) for i in range(count)]
    model_of = functools.cache(models.tiny_model)
    try:
        publisher.publish(0, model_of(0).named_parameters())
        publisher.wait_held(0, timeout_s=60, minimum=count)
        run(begin())
        for version in range(1, publications):
            publisher.publish(version, model_of(version).named_parameters())
            publisher.wait_held(version, timeout_s=60, minimum=count)
    finally:
        run(end())
        publisher.close()
    for lane, _ in started:
        held = [v for v in lane.held if v >= 0]  # too busy for a proof in time it holds nothing for a while
        assert held == list(range(publications))  # each one, never down
        _check(lane.done, model_of)


def _check(completions: list[Completion], model_of: Any) -> None:
    mixed = [c for c in completions if len(c.spans) > 1]
    assert mixed, "no request saw two versions"
    step = max(1, len(completions) // CHECKED)
    for c in [*completions[::step], *mixed[:30]]:
        assert [v for v, _, _ in c.spans] == sorted({v for v, _, _ in c.spans})
        for version, start, end in c.spans:
            assert largest_difference(model_of(version), c, (start, end)) < 1e-4
