"""A recorded run of real processes (only its generators are simulated), then its replays by the command."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.control import Control
from common.summary import Summary
from tests.live_run import ROOT, LiveRun
from tests.recorded import toy_sample
from tests.simulated import SimulatedGenerator

STEPS = 5
CONFIG = (
    "model.toy=true", "model.dtype=float32", "data.task=reverse_digits", "data.train_batch_size=4", "rollout.n=4",
    "data.max_prompt_length=16", "data.max_response_length=8", "actor.ppo_mini_batch_size=2", "actor.optim.lr=1e-3",
    "actor.use_kl_loss=true", "trainer.save_freq=2", "trainer.logger=[]", f"run.max_steps={STEPS}", "staleness.max=9",
    "actor.ppo_max_token_len_per_gpu=2048",
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    with record(tmp_path_factory.mktemp("recorded")) as run:
        yield run


@contextmanager
def record(folder: Path, *overrides: str) -> Iterator[LiveRun]:
    """Broker and learner by their commands; a simulated generator that holds version 0."""
    run = LiveRun(folder, server=True)
    control = Control(str(run.url), "live")
    generator = SimulatedGenerator(lambda: broker_of(control), "live", "simulated", make=toy_sample)
    try:
        control.register("generator", "simulated")
        broker = run.start("broker", *CONFIG, *overrides, f"run.dir={run.dir}")
        learner = run.start("learner")
        assert learner.wait(120) == 0, run.log(learner)[-3000:]
        assert broker.wait(30) == 0, run.log(broker)[-3000:]  # all of the ledger is in its one file now
        yield run
    finally:
        generator.close()
        control.close()
        run.close()


def broker_of(control: Control) -> str | None:
    control.refresh()
    return next((e.address for e in control.entries("broker") if e.address), None)


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LEEWAY")}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *args], capture_output=True, text=True, timeout=120,
        env={**clean, "LEEWAY_STRICT": "1"},
    )  # fmt: skip


def digests(run_dir: Path) -> list[str]:
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        return [d for (d,) in db.execute("SELECT digest FROM steps ORDER BY step")]


def test_the_run_is_replayed_to_the_bit(recorded: LiveRun, tmp_path: Path) -> None:
    assert len(set(digests(recorded.dir))) == STEPS
    done = launch("replay", str(recorded.dir), f"run.dir={tmp_path / 'new'}", "trainer.logger=[]")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = Summary.read(tmp_path / "new")
    assert summary is not None and (summary.equal_steps, summary.step, summary.version) == (STEPS, STEPS, STEPS)
    assert f"The weights after each of {STEPS} steps are those of the record." in " ".join(done.stdout.split())
    assert not (tmp_path / "new" / "ledger.sqlite").exists()
    weights = [(d / "hf" / "model.safetensors").read_bytes() for d in (recorded.dir, tmp_path / "new")]
    assert weights[0] == weights[1]


def test_a_run_of_two_ranks_is_replayed_by_two(tmp_path: Path) -> None:
    with record(tmp_path / "recorded", "trainer.nproc_per_node=2", "run.max_steps=3") as run:
        assert len(set(digests(run.dir))) == 3 and (run.dir / "logs" / "learner-rank1.log").is_file()
        done = launch("replay", str(run.dir), f"run.dir={tmp_path / 'new'}", "trainer.logger=[]")
        assert done.returncode == 0, done.stderr[-3000:]
        summary = Summary.read(tmp_path / "new")
        assert summary is not None and (summary.equal_steps, summary.step) == (3, 3)
        done = launch("replay", str(run.dir), f"run.dir={tmp_path / 'one'}", "trainer.nproc_per_node=1")
        assert done.returncode == 2 and "trainer.nproc_per_node: 1 != 2" in done.stderr


def test_what_differs_is_named(recorded: LiveRun, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("ledger.sqlite", "config.yaml"):
        (copy / name).write_bytes((recorded.dir / name).read_bytes())
    new = (f"run.dir={tmp_path / 'new'}", "trainer.logger=[]")
    done = launch("replay", str(copy), *new, "actor.optim.lr=2e-3")
    assert done.returncode == 2 and "actor.optim.lr: 0.002 != 0.001" in done.stderr
    with sqlite3.connect(copy / "ledger.sqlite") as db:
        db.execute("UPDATE steps SET settings = json_set(settings, '$.\"actor.optim.lr\"', 0.00101) WHERE step = 3")
    done = launch("replay", str(copy), *new)
    assert done.returncode == 2
    assert re.search(r"learner: error: step 3: the weights after it differ from the record", done.stderr)


def test_an_exported_file_is_trained_offline(recorded: LiveRun, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.parquet"
    done = launch("export", str(recorded.dir), str(file), "--no-text")
    assert done.returncode == 0 and re.search(r"[0-9]+ samples in ", done.stdout), done.stderr
    config = [c for c in CONFIG if not c.startswith(("data.task", "run.max_steps", "actor.optim.lr"))]
    done = launch(
        "replay", str(file), *config, "run.max_steps=3", "replay.mode=offline", "actor.optim.lr=5e-4",
        "algorithm.adv_estimator=rloo", f"run.dir={tmp_path / 'new'}", "run.id=offline",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    summary = Summary.read(tmp_path / "new")
    assert summary is not None and (summary.step, summary.samples_trained) == (3, 3 * 16)
