"""A real run (only its generator is simulated) that is stopped, goes back to a checkpoint and goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from common.control import Control
from common.summary import Summary
from common.wire import Sample
from tests.live_run import ROOT, LiveRun, assert_nothing_too_old_was_trained
from tests.recorded import fresh_sample
from tests.simulated import SimulatedGenerator

CONFIG = (
    "model.toy=true", "model.dtype=float32", "data.task=reverse_digits", "data.train_batch_size=4", "rollout.n=4",
    "data.max_prompt_length=16", "data.max_response_length=8", "actor.ppo_mini_batch_size=2", "actor.optim.lr=1e-3",
    "actor.ppo_max_token_len_per_gpu=2048", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=9", "trainer.logger=[]",
    "staleness.max=2",
)  # fmt: skip


@contextmanager
def generating(run: LiveRun, *, pause_after: int = -1) -> Iterator[SimulatedGenerator]:
    """A simulated generator that holds what was published; it pauses after so many samples (and what is due)."""
    control = Control(str(run.url), "live")

    def broker() -> str | None:
        control.refresh()
        generator.version = max([generator.version, *(e.version for e in control.entries("learner"))])
        return next((e.address for e in control.entries("broker") if e.address), None)

    made = count(1)

    def make(*key: int, version: int) -> Sample:
        if next(made) == pause_after:
            generator.paused.set()
        return fresh_sample(*key, version=version)

    generator = SimulatedGenerator(lambda: None, "live", "simulated", make=make)
    generator._address = broker
    try:
        control.register("generator", "simulated")
        yield generator
    finally:
        generator.close()
        control.forget_run()
        control.close()


def roll_back(run: LiveRun, step: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch.py"), "rollback", str(run.dir), str(step)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def train(run: LiveRun, steps: int) -> None:
    """Broker and learner by their commands until the last step."""
    with generating(run):
        broker = run.start("broker", *CONFIG, f"run.dir={run.dir}", f"run.max_steps={steps}")
        for process in (run.start("learner"), broker):
            assert process.wait(120) == 0, run.log(process)[-3000:]


def test_a_run_goes_back_to_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, server=True)
    try:
        train(run, 5)
        done = roll_back(run, 2)
        assert done.returncode == 0 and "goes on with step 7 at version 6" in done.stdout, done.stderr
        train(run, 8)
    finally:
        run.close()
    steps = run.query("SELECT step, version, applied, restored, abandoned FROM steps ORDER BY step")
    assert [row[:4] for row in steps] == [
        (1, 0, 1, None), (2, 1, 1, None), (3, 2, 1, None), (4, 3, 1, None), (5, 4, 1, None),
        (6, 5, 0, 2), (7, 6, 1, None), (8, 7, 1, None),
    ]  # fmt: skip
    assert [row[4] for row in steps] == [0, 0, 6, 6, 6, 0, 0, 0]
    assert_nothing_too_old_was_trained(run)
    before = "SELECT COUNT(*) FROM trained_tokens WHERE step > 6 AND sampled_at < 6"
    assert run.query(before) == [(0,)], "trained what was sampled before the rollback"
    assert [row["training/global_step"] for row in run.metrics()] == list(range(1, 9))
    assert run.metrics()[5]["training/rolled_back_to"] == 2
    assert {p.name for p in (run.dir / "checkpoints").glob("step_*")} == {f"step_{n}" for n in (0, 2, 6, 8)}
    summary = Summary.read(run.dir)
    assert summary is not None and (summary.step, summary.version, summary.steps_given_up) == (8, 8, 4)
    assert summary.samples_trained == 4 * 16


def test_a_run_that_goes_on_is_rolled_back_and_its_learner_comes_back(tmp_path: Path) -> None:
    """The learner ends with the exit code after which a supervisor starts it again."""
    run = LiveRun(tmp_path, server=True)
    try:
        with generating(run, pause_after=4 * 16) as generator:
            broker = run.start("broker", *CONFIG, f"run.dir={run.dir}", "run.max_steps=12")
            learner = run.start("learner")
            run.wait_for_step(4)
            done = roll_back(run, 2)
            assert done.returncode == 0 and "its learner comes back from there" in done.stdout, done.stderr
            generator.paused.clear()
            run.may_fail.append(learner)
            assert learner.wait(60) == 3
            assert "rolled the run back: the weights of this learner are given up" in run.log(learner)
            for process in (run.start("learner"), broker):
                assert process.wait(120) == 0, run.log(process)[-3000:]
    finally:
        run.close()
    [(number, version)] = run.query("SELECT step, version + 1 FROM steps WHERE restored = 2")
    assert number == version >= 5
    assert run.query("SELECT step FROM steps WHERE abandoned") == [(step,) for step in range(3, number)]
    surviving = run.query("SELECT step FROM steps WHERE applied AND NOT abandoned ORDER BY step")
    assert surviving == [(step,) for step in (1, 2, *range(number + 1, 13))]
    assert run.query(f"SELECT COUNT(*) FROM trained_tokens WHERE step > {number} AND sampled_at < {version}") == [(0,)]
    assert_nothing_too_old_was_trained(run)


def test_the_guard_has_a_run_go_back_and_in_the_end_ends_it(tmp_path: Path) -> None:
    """A limit that no step keeps: once back to the first checkpoint with half the rate, then the end."""
    run = LiveRun(tmp_path, server=True)
    rails = ("trainer.guard={limits: {actor/grad_norm: 1e-9}, patience: 2, max_rollbacks: 1}",)
    try:
        with generating(run):
            run.start("broker", *CONFIG, *rails, f"run.dir={run.dir}", "run.max_steps=30")
            for code, said in ((3, "the run goes back to"), (2, "after 1 rollbacks")):
                learner = run.start("learner")
                run.may_fail.append(learner)
                assert learner.wait(120) == code and said in run.log(learner), run.log(learner)[-3000:]
    finally:
        run.close()
    assert run.query("SELECT step, restored FROM steps WHERE restored IS NOT NULL") == [(3, 0)]
    rates = run.query("""SELECT step, json_extract(settings, '$."actor.optim.lr"') FROM steps WHERE applied""")
    assert sorted(rates) == [(1, 1e-3), (2, 1e-3), (4, 5e-4), (5, 5e-4)]
    summary = Summary.read(run.dir)
    assert summary is not None and summary.ended.startswith("ended by an error: guard: beyond actor/grad_norm")
    assert (summary.step, summary.steps_given_up, summary.samples_trained) == (5, 3, 2 * 16)
    assert summary.dropped["rolled_back"] > 0 and summary.hf_dir is None
