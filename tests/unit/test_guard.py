"""Guard rails: what they see in the metrics of a step, and what becomes of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import Config
from common.config import Guard as Rails
from common.errors import ConfigError, RolledBackError, TrainingError
from learner import resume
from learner.guard import Guard
from learner.loop import Learner
from learner.models import load_models
from tests.learner_parts import SimulatedControl, SimulatedFeed, alone, make_config, make_groups, make_learner

ALWAYS = ("trainer.guard.limits={actor/grad_norm: 1e-9}", "trainer.guard.patience=2", "trainer.save_freq=1",
          "trainer.max_ckpt_to_keep=3", "staleness.max=2")  # fmt: skip


@pytest.fixture
def start(weights: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(config: Config, feed: SimulatedFeed, control: SimulatedControl) -> Learner:
        learner = make_learner(
            config, load_models(config, weights, alone()), feed, tmp_path, control=control,
            guard=Guard(config.trainer.guard),
        )  # fmt: skip
        resume.resume(learner, feed.attach())
        return learner

    return make


def _feed(config: Config) -> SimulatedFeed:
    return SimulatedFeed(lambda step, version: make_groups(config, step, version=version))


def test_a_limit_counts_steps_in_a_row_and_names_what_is_beyond() -> None:
    guard = Guard(Rails(limits={"actor/ppo_kl": 0.1, "actor/grad_norm": 5}, patience=2))
    good, bad = {"actor/ppo_kl": 0.1, "actor/grad_norm": 5.0}, {"actor/ppo_kl": 0.2, "actor/grad_norm": 1.0}
    assert [guard.watch(v) for v in (bad, good, bad)] == ["", "", ""]
    assert guard.watch({"training/skipped": 1}) == "", "a skipped step neither adds nor forgives"
    assert guard.watch({"actor/ppo_kl": 0.0, "actor/grad_norm": math.nan}) == (
        "guard: actor/grad_norm = nan (limit 5), beyond for 2 steps"
    )
    assert guard.watch(bad) == "", "it counts anew"
    assert guard.watch({}) == "" and guard.beyond == 0, "what a step does not have, it cannot be beyond"


def test_it_goes_back_with_a_lower_rate_and_gives_up_after_some_times(start: Callable[..., Learner]) -> None:
    config = make_config(*ALWAYS, "trainer.guard.max_rollbacks=1", "trainer.guard.lr_factor=0.25")
    feed, control = _feed(config), SimulatedControl()
    first = start(config, feed, control)
    first.step()
    with pytest.raises(RolledBackError, match=r"actor/grad_norm = .* goes back to .*step_0"):
        first.step()
    assert feed.step_rows[-1].restored == 0 and feed.abandoned == ((1, 2),)
    assert control.limits["actor.optim.lr"] == pytest.approx(config.actor.optim.lr / 4)
    second = start(config, feed, control)
    assert (second.progress.step, second.progress.rollbacks, second.saved) == (3, 1, 3)
    second.step()
    assert feed.step_rows[-1].settings["actor.optim.lr"] == pytest.approx(config.actor.optim.lr / 4)
    with pytest.raises(TrainingError, match="after 1 rollbacks"):
        second.step()
    assert len(feed.abandoned) == 1


def test_it_pauses(start: Callable[..., Learner], caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(*ALWAYS, "trainer.guard.action=pause")
    control = SimulatedControl()
    learner = start(config, _feed(config), control)
    learner.step()
    assert control.state == "running"
    learner.step()
    assert control.state == "paused" and "the run is paused" in caplog.text


def test_it_ends_the_run(start: Callable[..., Learner]) -> None:
    config = make_config(*ALWAYS, "trainer.guard.action=stop")
    learner = start(config, _feed(config), SimulatedControl())
    with pytest.raises(TrainingError, match="beyond for 2 steps"):
        learner.run()


@pytest.mark.parametrize(
    ("options", "fault"),
    [(("trainer.guard.limits={actor/klloss: 1}",), "no such metric"),
     (("trainer.guard.limits={actor/ppo_kl: 1}", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2"), "as large"),
     (("trainer.guard.limits={actor/ppo_kl: 1}", "trainer.save_freq=-1"), "as large")],
)  # fmt: skip
def test_rails_that_cannot_work_are_refused(options: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_config(*options)
