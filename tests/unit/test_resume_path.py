"""`trainer.resume_mode=resume_path`: from a checkpoint that is named, of this run or of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import CheckpointError, ConfigError
from common.loading import load_config
from common.preflight import world_faults
from learner import resume
from learner.loop import Learner
from learner.models import load_models
from learner.served import weights_digest
from tests.learner_parts import BASE, SimulatedFeed, alone, make_config, make_groups, make_learner

KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "trainer.save_freq=2")


@pytest.fixture
def start(weights: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(folder: str, feed: SimulatedFeed, path: Path | None = None, begun: str = "1") -> Learner:
        named = (f"trainer.resume_from_path={path}", "trainer.resume_mode=resume_path") if path else ()
        config = make_config(*KL, "trainer.max_ckpt_to_keep=9", *named)
        learner = make_learner(config, load_models(config, weights, alone()), feed, tmp_path / folder)
        resume.resume(learner, feed.attach(), begun=begun)
        return learner

    return make


def make_feed() -> SimulatedFeed:
    return SimulatedFeed(lambda step, version: make_groups(make_config(), step, version=version))


def test_an_older_checkpoint_of_the_run_is_taken_once_and_its_steps_redone(start: Callable[..., Learner]) -> None:
    feed = make_feed()
    first = start("run", feed)
    for _ in range(5):
        first.step()
    digest = weights_digest(first.models.actor.module)
    named = first.checkpoints.folder / "step_2"

    second = start("run", feed, named, begun="2")
    assert (second.progress.step, second.saved) == (5, 5)
    assert weights_digest(second.models.actor.module) == digest
    assert second.models.kl_controller.value == first.models.kl_controller.value
    assert sorted(second.writer.lines) == [3, 4, 5], "the steps that were redone"
    second.step()
    third = start("run", feed, named, begun="2")  # restarted: from the newest
    assert (sorted(third.writer.lines), third.saved) == ([6], 5)
    with pytest.raises(CheckpointError, match="the ledger has only 1 steps"):
        feed.step_rows, feed.version = feed.step_rows[:1], 1
        start("run", feed, named, begun="3")


def test_a_new_run_begins_with_what_another_runs_checkpoint_has(start: Callable[..., Learner]) -> None:
    first = start("run", make_feed())
    for _ in range(2):
        first.step()
    named = first.checkpoints.folder / "step_2"
    feed = make_feed()
    second = start("other", feed, named)
    assert (second.progress.step, second.progress.version, second.saved, feed.checkpoints) == (0, 0, 0, [0])
    assert weights_digest(second.models.actor.module) == weights_digest(first.models.actor.module)
    state = [p.optimizer.state[p.parameters[0]] for p in (first.models.actor, second.models.actor)]
    assert state[0]["step"] == state[1]["step"] == 4
    assert second.models.kl_controller.value == first.models.kl_controller.value
    second.step()
    with pytest.raises(CheckpointError, match="is another run's, and this one already has 1 steps"):
        start("other", feed, named, begun="2")


def test_a_damaged_one_is_refused_by_its_file(start: Callable[..., Learner]) -> None:
    first = start("run", make_feed())
    (file,) = (first.checkpoints.folder / "step_0").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is damaged"):
        start("other", make_feed(), file.parent)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["trainer.resume_mode=resume_path"], "give the checkpoint with trainer.resume_from_path="),
        (["trainer.resume_from_path=/tmp"], "is not used with trainer.resume_mode=auto"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/step_3"], "is no finished checkpoint"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/x/latest"], "give …/checkpoints/step_N"),
    ],
)
def test_a_path_that_cannot_be_meant_is_a_fault_before_the_run(overrides: list[str], fault: str) -> None:
    (found,) = world_faults(load_config([], [*BASE, *overrides]))
    assert fault in found


def test_another_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.resume_mode"):
        make_config("trainer.resume_mode=latest")
