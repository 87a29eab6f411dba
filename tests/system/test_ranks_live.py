"""A run whose learner has two ranks that divide each row: it trains, survives the death of one, and goes on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.live_run import LiveRun, until


def _ranks(run: LiveRun) -> list[psutil.Process]:
    """The learner's processes, by rank."""
    found = {}
    for process in run.below():
        try:
            if process.cmdline()[1:4] == ["-u", "-m", "learner"]:
                found[int(process.environ()["RANK"])] = process
        except (psutil.Error, KeyError):
            continue
    return [found[rank] for rank in sorted(found)]


@pytest.mark.engine
def test_a_killed_rank_takes_the_learner_down_and_it_comes_back(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    try:
        launched = run.start(
            "run", *run.settings(
                "trainer.nproc_per_node=2", "actor.ulysses_sequence_parallel_size=2", "run.max_steps=40",
                "generators.count=1", "model.warmup.steps=0",
                "data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "trainer.save_freq=4", "trainer.logger=[]",
            ),
        )  # fmt: skip
        run.wait_for_step(5)
        ranks = _ranks(run)
        assert len(ranks) == 2
        generator, before = run.process("generator"), run.step()
        ranks[1].kill()
        until(lambda: not ranks[0].is_running(), 60, "the end of the other rank")
        run.wait_for_step(before + 3)
        assert generator.is_running()
        assert launched.wait(180) == 0, run.log(launched)[-3000:]
        assert [int(m["training/global_step"]) for m in run.metrics()] == list(range(1, 41))
        assert run.query("SELECT count(*), count(DISTINCT step) FROM steps") == [(40, 40)]
        assert "learner: killed by a signal; started again" in (run.dir / "logs" / "launcher.log").read_text()
    finally:
        run.close()
