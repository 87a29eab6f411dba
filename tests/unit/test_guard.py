"""Guard rails: what they see in the metrics of a step, and what becomes of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import Config
from common.config import Guard as Rails
from common.errors import ConfigError, RolledBackError, Stopped, TrainingError
from common.loading import load_config
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
    guard = Guard(Rails(limits={"rollout_corr/k3_kl": 0.1, "actor/grad_norm": 5}, patience=2))
    good, bad = {"rollout_corr/k3_kl": 0.1, "actor/grad_norm": 5.0}, {"rollout_corr/k3_kl": 0.2, "actor/grad_norm": 1.0}
    for step, values in enumerate((bad, good, bad), 1):
        assert guard.watch(step, values) == ("", -1)
    assert guard.watch(4, {"training/skipped": 1}) == ("", -1), "a skipped step neither adds nor forgives"
    said, first = guard.watch(5, {"rollout_corr/k3_kl": math.nan, "actor/grad_norm": 5.0})
    assert first == 3 and said == "guard: beyond rollout_corr/k3_kl = nan (limit 0.1) for 2 steps"
    assert guard.watch(6, good) == ("", -1)


def test_a_metric_that_comes_now_and_then_counts_where_it_comes() -> None:
    guard = Guard(Rails(limits={"val-core/score": 0.5, "actor/grad_norm": 5}, patience=2))
    steps = [{"actor/grad_norm": 1.0} | ({"val-core/score": 0.9} if step % 5 == 0 else {}) for step in range(11)]
    assert [first for step, v in enumerate(steps) if (first := guard.watch(step, v)[1]) >= 0] == [0, 0, 0, 0, 0, 0]


def test_a_learner_that_comes_back_knows_the_steps_since_the_rollback() -> None:
    guard = Guard(Rails(limits={"actor/grad_norm": 5}, patience=3))
    rows = [{"step": step, "actor/grad_norm": None if step == 7 else 9.0} for step in range(1, 12)]
    guard.recall(rows, after=5, to=7)  # 8 and later are not acknowledged
    assert guard.watch(8, {"actor/grad_norm": 6.0}) == ("guard: beyond actor/grad_norm = 6 (limit 5) for 3 steps", 6)


def test_it_goes_back_with_a_lower_rate_and_gives_up_after_some_times(start: Callable[..., Learner]) -> None:
    config = make_config(*ALWAYS, "trainer.guard.max_rollbacks=1", "trainer.guard.lr_factor=0.25")
    feed, control = _feed(config), SimulatedControl()
    first = start(config, feed, control)
    first.step()
    with pytest.raises(RolledBackError, match=r"actor/grad_norm = .* goes back to .*step_0"):
        first.step()
    assert feed.step_rows[-1].restored == 0 and feed.abandoned == ((1, 2),)
    assert control.limits == {}, "the rate stands in the ledger"
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
    assert "the run is paused" in caplog.text
    control.away = True
    assert learner.guard_pauses() and learner.guard_pauses() and control.state == "running", "by itself"
    assert caplog.text.count("once Redis is back") == 1
    control.away = False
    assert not learner.guard_pauses() and control.state == "paused", "then as everybody knows it"
    control.state = "running"
    assert not learner.guard_pauses(), "a person has resumed it"


def test_nothing_is_trained_after_the_pause_not_even_what_is_ready(start: Callable[..., Learner]) -> None:
    config = make_config(*ALWAYS, "trainer.guard.action=pause")
    feed, control = _feed(config), SimulatedControl()
    learner = start(config, feed, control)
    for _ in range(2):
        learner.step()
    control.update = lambda **fields: learner.stop.set() if fields.get("state") == "paused" else None
    with pytest.raises(Stopped):
        learner.step()
    assert control.state == "paused" and len(feed.step_rows) == 2


def test_it_ends_the_run(start: Callable[..., Learner]) -> None:
    config = make_config(*ALWAYS, "trainer.guard.action=stop")
    learner = start(config, _feed(config), SimulatedControl())
    with pytest.raises(TrainingError, match="for 2 steps"):
        learner.run()


@pytest.mark.parametrize(
    ("options", "fault"),
    [(("trainer.guard.limits={actor/klloss: 1}",), "no such metric"),
     (("trainer.guard.limits={actor/kl_loss: 1}", "actor.use_kl_loss=false"), "there is none with"),
     (("trainer.guard.limits={actor/grad_norm: .inf}",), r"trainer\.guard\.limits\.actor/grad_norm=inf"),
     (("trainer.guard.limits={actor/grad_norm: abc}",), r"trainer\.guard\.limits\.actor/grad_norm='abc'"),
     (("trainer.guard.limits={actor/grad_norm: 1}", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2"), "as large"),
     (("trainer.guard.limits={actor/grad_norm: 1}", "trainer.save_freq=-1"), "as large")],
)  # fmt: skip
def test_rails_that_cannot_work_are_refused(options: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_config(*options)


def test_a_rate_given_to_the_run_is_lowered_too(start: Callable[..., Learner]) -> None:
    config = make_config(*ALWAYS, "trainer.guard.lr_factor=0.5")
    feed, control = _feed(config), SimulatedControl()
    control.limits["actor.optim.lr"] = 8e-4
    first = start(config, feed, control)
    first.step()
    with pytest.raises(RolledBackError):
        first.step()
    second = start(config, feed, control)
    second.step()
    assert [row.settings["actor.optim.lr"] for row in feed.step_rows if row.applied] == [8e-4, 8e-4, 4e-4]


def test_limits_can_be_taken_back(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("trainer: {guard: {limits: {actor/grad_norm: 5}, action: stop}}\n")
    given = ["model.toy=true", "data.task=reverse_digits"]

    def limits(*more: str) -> dict[str, float]:
        return load_config([str(base)], [*given, *more]).trainer.guard.limits

    assert limits("trainer.guard.limits.critic/vf_loss=2") == {"actor/grad_norm": 5, "critic/vf_loss": 2}
    assert limits("trainer.guard.limits={}") == limits("trainer.guard.limits=null") == {}
    over = tmp_path / "over.yaml"
    over.write_text("trainer: {guard: {limits: {}}}\n")
    assert load_config([str(base), str(over)], given).trainer.guard.limits == {}
