"""One generator as a process: ``python -m generators.loop``. It starts the parts, and ends them in order.

The parts: the scorer (first, so that a bad reward function ends the process at once), the tokenizer,
the engine, the line to the broker (``generator.py``), the line to the learner (``member.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import zlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from common.control import Control
from common.errors import EngineError, Stopped
from common.roles import Role, run_role
from generators.engine import Engine
from generators.environments import load_environment
from generators.generator import Generator
from generators.member import Member
from generators.rewards.scorer import Scorer

T = TypeVar("T")


async def run_generator(role: Role) -> None:
    """One generator from start to end.

    Raises:
        ConfigError: the reward function or the tokenizer cannot be loaded.
        EngineError: vLLM does not start, or ends.
        DeadlineError: no learner or broker within ``run.start_timeout_s``.
    """
    config, log, control = role.config, role.log, role.control
    incarnation = f"{os.getpid()}-{time.time_ns()}"
    stop = _event_of(role.stop)
    control.register("generator", role.name)
    scorer = await Scorer.start(config, log)
    engine: Engine | None = None
    member: asyncio.Task[Any] | None = None
    try:
        control.update(state="waits for the model folder of the learner")
        deadline_s = config.run.start_timeout_s
        model_path = await asyncio.to_thread(control.wait_for_model, deadline_s, role.stop)
        environment = load_environment(model_path, config)
        control.update(state="starts its engine")
        seed = zlib.crc32(f"{config.run.seed}/{role.name}/{incarnation}".encode()) >> 1
        engine = await _unless(stop, Engine.start(model_path=model_path, config=config, seed=seed))
        generator = Generator(
            config=config, run_id=control.run_id, name=role.name, incarnation=incarnation, engine=engine,
            environment=environment, scorer=scorer, lookup_broker=lambda: _address(control, "broker"), log=log,
            desired=control.desired, on_state=lambda state, version: control.update(state=state, version=version),
        )  # fmt: skip
        weights = Member(
            engine=engine, run_id=control.run_id, name=role.name, incarnation=incarnation,
            lookup_address=lambda: _address(control, "learner"),
        )  # fmt: skip
        weights.on_version = generator.version_changed
        member = asyncio.create_task(weights.run(), name="weights")
        control.update(ready=1)  # from now on a death is worth a restart, see `fleet.py`
        await _first_end(stop, generator, member, engine)
    finally:
        if member is not None:
            member.cancel()
            await asyncio.wait([member])
        scorer.close()
        if engine is not None:
            await engine.close()


async def _first_end(stop: asyncio.Event, generator: Generator, member: asyncio.Task[Any], engine: Engine) -> None:
    """Run until told to stop or until a part fails; the leases are given back in any case."""
    ended = asyncio.Event()
    sampling = asyncio.create_task(generator.run(ended), name="generator")
    death = asyncio.create_task(engine.wait_dead(), name="engine-death")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    parts = [stopped, sampling, member, death]
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.set()
        await asyncio.wait([sampling])
        stopped.cancel()
        death.cancel()
    if death.done() and not death.cancelled() and not stop.is_set():
        raise EngineError("the engine process ended; vLLM's own message is above on stderr")
    for part in (sampling, member):
        if part.done():
            part.result()


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
    sys.exit(run_role(main, "generator"))
