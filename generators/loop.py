"""One generator as a process: ``python -m generators.loop``. It starts the parts, and ends them in order.

The parts: the scorer (first, so that a bad reward function ends the process at once), the tokenizer,
the engine, the line to the broker (``generator.py``), the line to the learner (``member.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import zlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from common.control import Control
from common.errors import DeadlineError, EngineError, Stopped
from common.roles import Role, end_process, run_role
from generators.engine import Engine
from generators.environments import load_environment
from generators.generator import Generator
from generators.member import Member
from generators.model_folder import model_folder
from generators.requests import ENDED
from generators.rewards.scorer import Scorer

T = TypeVar("T")


async def run_generator(role: Role) -> None:
    """One generator from start to end.

    Raises:
        ConfigError: the reward function or the tokenizer cannot be loaded; see also `model_folder`.
        EngineError: vLLM does not start, or ends.
        DeadlineError: no learner or broker within ``run.start_timeout_s``.
    """
    config, log, control = role.config, role.log, role.control
    incarnation = f"{os.getpid()}-{time.time_ns()}"
    stop = _event_of(role.stop)
    control.register("generator", role.name)
    scorer = await Scorer.start(config, log)
    engine: Engine | None = None
    try:
        control.update(state="waits for the model folder of the learner")
        model_path = await asyncio.to_thread(model_folder, control, config, role.run_dir, role.stop)
        environment = load_environment(model_path, config)
        control.update(state="starts its engine")
        seed = zlib.crc32(f"{config.run.seed}/{role.name}/{incarnation}".encode()) >> 1
        engine = await _unless(stop, Engine.start(model_path=model_path, config=config, seed=seed))
        generator = Generator(
            config=config, run_id=control.run_id, name=role.name, incarnation=incarnation, engine=engine,
            environment=environment, scorer=scorer, lookup_broker=lambda: _address(control, "broker"), log=log,
            desired=control.desired, limit=control.limit,
            on_state=lambda state, version: control.update(state=state, version=version),
        )  # fmt: skip
        weights = Member(
            engine=engine, run_id=control.run_id, name=role.name, incarnation=incarnation,
            lookup_address=lambda: _address(control, "learner"), on_version=generator.version_changed,
        )  # fmt: skip
        control.update(ready=1)  # from now on a death is worth a restart, see `fleet.py`
        await _first_end(role, stop, generator, weights, engine)
    finally:
        scorer.close()
        if engine is not None:
            await engine.close()


async def _first_end(role: Role, stop: asyncio.Event, generator: Generator, weights: Member, engine: Engine) -> None:
    """Run until told to stop or until a part fails; the leases are given back in any case."""
    ended = asyncio.Event()
    stopped = asyncio.create_task(stop.wait(), name="stop")
    sampling = asyncio.create_task(generator.run(ended), name="generator")
    others = [
        asyncio.create_task(weights.run(), name="weights"),
        asyncio.create_task(_die_with(engine), name="engine-death"),
        asyncio.create_task(_miss_learner(role, engine), name="learner"),
    ]
    try:
        await asyncio.wait([stopped, sampling, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.set()
        await asyncio.wait([sampling])
        for task in (stopped, *others):
            task.cancel()
        await asyncio.wait([stopped, *others])
    errors = [e for task in (sampling, *others) if not task.cancelled() and (e := task.exception())]
    if errors and not role.stop.is_set():  # a stop also reaches the engine's process, whose end is then no error
        raise errors[0]


async def _die_with(engine: Engine) -> None:
    await engine.wait_dead()
    raise EngineError(ENDED)


async def _miss_learner(role: Role, engine: Engine) -> None:
    """Raises DeadlineError if there is no learner for too long before its first weights have come.

    A learner may warm up for as long as it likes; without one, weights already held do no harm.
    """
    limit_s, seen_at = role.config.run.start_timeout_s, time.monotonic()
    while engine.version < 0:
        if _address(role.control, "learner"):
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > limit_s:
            raise DeadlineError("a learner in the registry, for its first weights", limit_s, "start one for this run")
        await asyncio.sleep(min(1.0, limit_s))  # the registry is read once a second
    await asyncio.Event().wait()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; raises Stopped, and cancels it, when ``stop`` comes first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Stopped("its engine to start")
    finally:
        task.cancel()
        stopped.cancel()


def _address(control: Control, role: str) -> str | None:
    return next((e.address for e in control.entries(role) if e.address), None)


def _event_of(stop: threading.Event) -> asyncio.Event:
    """An event of this loop that is set when ``stop`` is."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        stop.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(event.set)

    threading.Thread(target=wait, name="stop", daemon=True).start()
    return event


def main(role: Role) -> None:
    asyncio.run(run_generator(role))


if __name__ == "__main__":
    end_process(run_role(main, "generator"))
