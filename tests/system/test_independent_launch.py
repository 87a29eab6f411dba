"""The same run as four commands in any order; who joins, dies and returns while it goes on."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.live_run import LiveRun, assert_nothing_too_old_was_trained, until

pytestmark = pytest.mark.engine
COMMANDS = ("broker", "learner", "generators", "generators")
ORDERS = list(itertools.permutations(range(4)))
SAMPLE = random.Random(7).sample([(order, giver) for order in ORDERS for giver in range(4)], 1)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path, server=True)
    yield run
    run.close()


def contributors(run: LiveRun) -> set[str]:
    """Generators with a trained sample."""
    sql = "SELECT DISTINCT s.generator FROM samples s JOIN attempts a USING (grp, attempt) WHERE a.state = 'trained'"
    return {name for (name,) in run.query(sql)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("order", "giver"),
    [
        pytest.param(order, giver, marks=() if (order, giver) in SAMPLE else pytest.mark.soak)
        for order, giver in [*SAMPLE, *((ORDERS[i * 6], i) for i in range(4))]
    ],
)
def test_four_commands_in_any_order(live: LiveRun, order: tuple[int, ...], giver: int) -> None:
    """Command ``giver`` brings the config. Then a third generator joins, one and the learner are killed."""
    config = live.settings("run.max_steps=200", "model.warmup.steps=5", "generators.count=1", "trainer.save_freq=5")
    learner = -1
    for i in order:
        name = ["--name", f"fleet{i}"] if COMMANDS[i] == "generators" else []
        live.start(COMMANDS[i], *name, *(config if i == giver else []))
        learner = len(live.started) - 1 if COMMANDS[i] == "learner" else learner
    live.wait_for_step(3)

    live.start("generators", "--name", "third")
    until(
        lambda: any("third" in name for name in contributors(live)), 120, "samples of the third generator are trained"
    )

    victim = live.process("generator", "fleet2")
    victim.kill()
    live.wait_for_step(live.step() + 3)

    kept = {
        p["name"]: p["pid"] for p in live.status()["processes"] if p["role"] == "generator" and "fleet3" in p["name"]
    }
    live.may_fail.append(live.started[learner])
    live.process("learner").kill()
    live.started[learner].wait(60)
    before = live.step()
    live.start("learner")
    live.wait_for_step(before + 6)
    assert all(psutil.pid_exists(pid) for pid in kept.values()), "generators stay while the learner restarts"

    assert_nothing_too_old_was_trained(live)
    steps = [row[0] for row in live.query("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))
    told = [int(row["training/global_step"]) for row in live.metrics()]
    assert told == sorted(set(told)), "a redone step is not told twice"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "point",
    [
        "staging.bucket:3",
        *(
            pytest.param(p, marks=pytest.mark.soak)
            for p in ("generator.sample_made:20", "worker.stage:2", "worker.load:2", "member.swap:2", "member.held:2")
        ),
    ],
)
def test_on_policy_with_a_member_killed_in_mid_transfer(live: LiveRun, point: str) -> None:
    """`staleness.max=0`; the learner is there first; one of two generators dies in its work, by a SIGKILL."""
    config = live.settings(
        "run.max_steps=12", "model.warmup.steps=5", "generators.count=1", "staleness.max=0", "weights.timeout_s=3"
    )
    live.start("learner", *config)
    live.start("broker")
    until(lambda: "learner" in live.roles(), 60, "the learner is registered")
    live.start("generators", "--name", "steady")
    live.start("generators", "--name", "fragile", LEEWAY_FAILPOINT=f"{point}:kill")
    live.wait_for_step(12, within_s=240)

    until(lambda: all(p.poll() is not None for p in live.started[:2]), 60, "learner and broker end")
    assert live.query("SELECT count(*) FROM trained_tokens WHERE sampled_at <> trained_at") == [(0,)]
    rows = live.metrics()
    assert [row["staleness/max"] for row in rows] == [0] * 12
    assert all(row["rollout_corr/num_same_version_tokens"] == row["perf/num_response_tokens"] for row in rows)
    assert max(row["rollout_corr/logprob_diff_max"] for row in rows) <= 1e-4


@pytest.mark.timeout(400)
def test_the_only_generator_comes_late_and_is_killed_and_started_again(live: LiveRun) -> None:
    """Learner and broker alone wait by name; then the only generator dies and another process takes its place."""
    live.start("broker", *live.settings("run.max_steps=60", "model.warmup.steps=5", "generators.count=1"))
    learner = live.start("learner")
    until(lambda: "no generator is connected" in live.log(learner), 90, "the learner says what it waits for")
    fleet = live.start("generators", "--name", "only")
    live.wait_for_step(2)
    first = live.process("generator", "only").pid
    fleet.send_signal(signal.SIGKILL)  # its generators die with it
    fleet.wait()
    until(lambda: not psutil.pid_exists(first), 5, "no orphan")
    reached = live.step()
    live.start("generators", "--name", "only")
    live.wait_for_step(reached + 3)
    assert_nothing_too_old_was_trained(live)
