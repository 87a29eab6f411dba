"""Checkpoints are written beside training, and a kill at any moment leaves one that loads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, FencedError
from common.hashes import verify
from learner import checkpoint, resume, saving
from learner.checkpoint import Checkpoints
from learner.loop import Learner
from learner.models import load_models
from learner.served import weights_digest
from tests.learner_parts import SimulatedFeed, alone, make_config, make_groups, make_learner

ROOT = Path(__file__).resolve().parents[2]
FEW = ["data_written", "aside", "renamed", "retired", "random:0", "random:1"]
MANY = [*saving.POINTS, *(f"random:{i}" for i in range(100))]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, marks=pytest.mark.soak)], ids=["few", "many"])
def test_a_kill_at_any_moment_of_saving_leaves_a_checkpoint_that_loads(tmp_path: Path, kills: list[str]) -> None:
    """The program proves after each kill that what was saved last, and told, is there and loads."""
    program = [sys.executable, "-m", "tests.saving_program", str(tmp_path), *kills]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) >= len(kills) // 4


def test_a_save_passes_every_point_in_order(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(saving, "failpoint", lambda name: passed.append(name.removeprefix("learner.checkpoint.")))
    config = make_config("trainer.max_ckpt_to_keep=1")
    models = load_models(config, weights, alone())
    c = Checkpoints(tmp_path, run_id="test", keep=1, ranks=alone())
    missing = {"first": {"aside", "retired", "removed"}, "next": {"aside"}, "again": {"retired", "removed"}}
    for step, which in ((1, "first"), (2, "next"), (2, "again")):
        passed.clear()
        c.save(step, models, {})
        assert passed == [p for p in saving.POINTS if p not in missing[which] | {"told"}], which


@pytest.fixture
def learner_of(weights: Path, tmp_path: Path) -> Callable[..., Learner]:
    def make(*options: str, feed: SimulatedFeed | None = None) -> Learner:
        config = make_config("trainer.async_save=true", *options)
        feed = feed or SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
        learner = make_learner(config, load_models(config, weights, alone()), feed, tmp_path / "run")
        resume.resume(learner, feed.attach())
        return learner

    return make


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Checkpoints (but that of step 0) reach their place once it is set."""
    opened, put_in_place = threading.Event(), checkpoint.put_in_place

    def put(fresh: Path, target: Path, **options: object) -> None:
        assert target.name == "step_0" or opened.wait(60)
        put_in_place(fresh, target, **options)

    monkeypatch.setattr(checkpoint, "put_in_place", put)
    return opened


def test_training_goes_on_while_a_checkpoint_is_written(
    learner_of: Callable[..., Learner], gate: threading.Event
) -> None:
    """The broker hears of it once it is in its place, and it holds the weights of its own step."""
    learner = learner_of("trainer.save_freq=3")
    learner.step()
    learner.save(wanted=True)  # by the broker
    digest = weights_digest(learner.models.actor.module)
    learner.step()
    learner.step()
    assert (learner.feed.checkpoints, learner.checkpoints.steps(), learner.saved) == ([0], [0], 1)
    gate.set()
    learner.confirm_saved(wait=True)
    assert (learner.feed.checkpoints, learner.checkpoints.steps()) == ([0, 1], [0, 1])
    state = learner.checkpoints.load(learner.checkpoints.latest(), learner.models)
    assert (state["step"], weights_digest(learner.models.actor.module)) == (1, digest)


@pytest.mark.parametrize("freq", [1, 2])
def test_a_crash_has_at_most_one_interval_redone_however_slow_the_disk(
    learner_of: Callable[..., Learner], gate: threading.Event, monkeypatch: pytest.MonkeyPatch, freq: int
) -> None:
    """The step after a save is trained while the disk writes, and acknowledged when the checkpoint is in its place."""
    learner = learner_of(f"trainer.save_freq={freq}")
    for _ in range(freq):
        learner.step()
    trained, told = threading.Event(), []
    train, acknowledge = learner.train, learner.feed.acknowledge

    def train_and_say(*args: object, **options: object) -> object:
        outcome = train(*args, **options)
        trained.set()
        return outcome

    def acknowledge_and_note(**fields: object) -> object:
        told.append(list(learner.feed.checkpoints))
        return acknowledge(**fields)

    monkeypatch.setattr(learner, "train", train_and_say)
    monkeypatch.setattr(learner.feed, "acknowledge", acknowledge_and_note)
    due = threading.Thread(target=learner.step)
    due.start()
    assert trained.wait(60)
    due.join(0.3)
    assert due.is_alive() and not told
    gate.set()
    due.join(60)
    assert told == [[0, freq]] and len(learner.feed.step_rows) == freq + 1


def test_one_is_in_the_making_at_most(learner_of: Callable[..., Learner], gate: threading.Event) -> None:
    """The next one that is due waits for it, and both come to the broker in order; the last is waited for."""
    learner = learner_of("trainer.save_freq=3")
    learner.step()
    learner.save(wanted=True)
    learner.step()
    due = threading.Thread(target=lambda: learner.save(wanted=True))
    due.start()
    due.join(0.3)
    assert due.is_alive() and learner.feed.checkpoints == [0]
    gate.set()
    due.join(60)
    learner.save(wanted=True, wait=True)
    assert (learner.feed.checkpoints, learner.checkpoints.steps()) == ([0, 1, 2], [1, 2])


def test_a_step_to_be_undone_waits_for_the_checkpoint_in_the_making(
    learner_of: Callable[..., Learner], gate: threading.Event
) -> None:
    learner = learner_of("trainer.save_freq=2", "trainer.max_ckpt_to_keep=1")
    learner.step()
    learner.step()
    before = weights_digest(learner.models.actor.module)
    threading.Timer(0.1, gate.set).start()
    resume.restore_weights(learner)
    assert learner.feed.checkpoints == [0, 2]
    assert weights_digest(learner.models.actor.module) == before


def test_a_full_disk_ends_the_learner_with_its_reason_and_leaves_the_last_checkpoint(
    learner_of: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of("trainer.save_freq=1")

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "_write_json", full)
    learner.step()
    with pytest.raises(CheckpointError, match=r"step 1 cannot be written \(No space left.*state\.json.*disk full"):
        learner.confirm_saved(wait=True)
    monkeypatch.undo()
    assert learner.checkpoints.latest() == learner.checkpoints.folder / "step_0"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, weights: Path) -> None:
    """DCP's own failures, of whichever rank."""
    models = load_models(make_config(), weights, alone())
    c = Checkpoints(tmp_path, run_id="test", keep=1, ranks=alone())
    c.begin(1, models, {})
    c.finished(wait=True)
    group = c._group
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: cannot be written \(rank 0: .*File exists"):
        saving.write_tensors({"rng": models.actor.parameters[0]}, tmp_path / "file", group)


def test_a_learner_that_was_replaced_puts_no_checkpoint_in_its_place(learner_of: Callable[..., Learner]) -> None:
    """Frozen while the next one takes over, it goes on to save."""
    learner = learner_of("trainer.save_freq=1")
    learner.step()
    learner.confirm_saved(wait=True)
    later = Checkpoints(learner.checkpoints.folder, run_id="test", keep=2, ranks=alone())
    later.take_over(2)
    with pytest.raises(FencedError, match="is written by the learner of epoch 2; this one has 1"):
        learner.step()
        learner.confirm_saved(wait=True)
    assert later.steps() == [0, 1]
    with pytest.raises(FencedError):
        learner.checkpoints.take_over(1)


def test_what_crashes_left_behind_goes_and_a_replaced_checkpoint_gets_its_name_back(
    tmp_path: Path, weights: Path
) -> None:
    models = load_models(make_config(), weights, alone())
    c = Checkpoints(tmp_path, run_id="test", keep=9, ranks=alone())
    for step in (1, 2):
        c.save(step, models, {})
    (tmp_path / ".step_3.new").mkdir()
    os.rename(tmp_path / "step_2", tmp_path / ".step_2.old")  # killed between two renames
    (tmp_path / ".step_1.old").mkdir()  # killed after them
    (tmp_path / "notes").mkdir()
    c.tidy()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_1", "step_2"]
    verify(c.latest())
    assert c.latest().name == "step_2"


def test_the_thread_has_the_gpu_of_who_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's writer waits for the current device's stream, and a new thread's is that of GPU 0."""
    set_in: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: set_in.append((d, threading.current_thread().name)))
    saving.in_thread(lambda: set_in.append((-1, "work")), name="writer").result(10)
    assert set_in == [(3, "writer"), (-1, "work")]
