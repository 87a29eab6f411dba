"""A real learner and a real broker; the learner is killed at each of its failpoints and comes back.

The generator is simulated: it holds whatever version was published last, and samples nothing.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.control import Control
from learner import saving
from tests.live_run import ROOT, LiveRun, assert_nothing_too_old_was_trained, until
from tests.simulated import SimulatedGenerator

# From the code: no point without a test. (Those of a save that replaces or removes another: tests/saving_program.py.)
SAVING = [f"learner.checkpoint.{p}" for p in saving.POINTS if p not in ("aside", "retired", "removed")]
POINTS = sorted(
    {p for f in (ROOT / "learner").glob("*.py") for p in re.findall(r'failpoint\("(learner\.[^"]+)"\)', f.read_text())}
    | set(SAVING)
)
SAVE_FREQ = 3
SAMPLE = random.Random(3).sample(POINTS, 6)


class FollowingGenerator:
    """A simulated generator, with its registry entry, that follows the versions of the learner."""

    def __init__(self, run: LiveRun) -> None:
        assert run.url
        self.control = Control(run.url, "live", deadline_s=30)
        self.control.register("generator", "simulated-0", state="samples")
        self.generator = SimulatedGenerator(lambda: self._address("broker"), "live", "simulated-0", version=-1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(0.05):
            versions = [e.version for e in self.control.entries("learner")]
            self.generator.version = max([self.generator.version, *versions])

    def _address(self, role: str) -> str | None:
        return next((e.address for e in self.control.entries(role) if e.address), None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.generator.close(bye=True)
        self.control.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path, server=True)
    config = run.settings(
        "run.max_steps=1000", "model.warmup.steps=2", "generators.count=0", f"trainer.save_freq={SAVE_FREQ}",
        "trainer.test_freq=-1", "trainer.logger=[]", "data.train_batch_size=4", "rollout.n=4",
        "actor.ppo_mini_batch_size=2",
    )  # fmt: skip
    run.start("broker", *config)
    generator = FollowingGenerator(run)
    yield run
    generator.close()
    run.close()


def killed_at(run: LiveRun, point: str, nth: int) -> None:
    """A learner that is armed with ``point`` comes that far, redoing what it must to the bit, and dies there."""
    learner = run.start("learner", LEEWAY_FAILPOINT=f"{point}:{nth}")
    run.may_fail.append(learner)
    until(lambda: learner.poll() is not None, 120, f"the learner dies at {point}")
    said = run.log(learner)
    assert "Signal 9 (SIGKILL)" in said and "not to the bit" not in said, said[-3000:]


def goes_on(run: LiveRun, steps: int) -> str:
    """A learner without failpoints makes ``steps`` more; its log."""
    before = run.query("SELECT max(step) FROM steps")[0][0] or 0
    learner = run.start("learner")
    run.wait_for_step(before + steps, within_s=120)
    run.process("learner").terminate()
    until(lambda: learner.poll() is not None, 60, "the learner ends")
    return run.log(learner)


def assert_consistent(run: LiveRun) -> None:
    """One row a step, each told once; versions rise by one with each; nothing twice, nothing too old."""
    assert_nothing_too_old_was_trained(run)
    rows = run.query("SELECT step, version FROM steps ORDER BY step")
    assert rows == [(step, step - 1) for step in range(1, len(rows) + 1)]
    told = [int(row["training/global_step"]) for row in run.metrics()]
    assert told == list(range(1, len(rows) + 1))


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(SAMPLE, marks=pytest.mark.timeout(400), id="sample"),
        pytest.param(POINTS * 2, marks=[pytest.mark.soak, pytest.mark.timeout(2400)], id="all"),
    ],
)
def test_a_learner_killed_anywhere_redoes_its_steps(live: LiveRun, points: list[str]) -> None:
    """Killed at one point after the other; what is redone comes out to the bit.

    It is at most one interval of checkpoints: the step after a save is acknowledged once the checkpoint is there.
    """
    draw = random.Random(len(points))
    for point in points:
        killed_at(live, point, nth=draw.randint(1, 2 if "checkpoint" in point else SAVE_FREQ + 2))
        last = live.query("SELECT max(step) FROM steps")[0][0] or 0
        saved = live.query("SELECT max(step) FROM checkpoints")[0][0] or 0
        assert last - saved <= SAVE_FREQ, f"{point}: {last - saved} steps to redo"
    said = goes_on(live, steps=4)
    assert "not to the bit" not in said and "continues from" in said
    assert_consistent(live)
