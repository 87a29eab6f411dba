"""Checkpoints: latest by number, whole or not there, refused by file name when damaged, complete."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from common import failpoints
from common.errors import CheckpointError
from common.hashes import verify
from learner.batch import make_batch
from learner.checkpoint import Checkpoints
from learner.models import Models, load_models
from learner.packing import Packing, micro_batches
from learner.served import weights_digest
from tests.learner_parts import alone, initial_weights, make_config, make_groups

CONFIG = make_config("algorithm.adv_estimator=gae", "algorithm.kl_ctrl.type=adaptive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return initial_weights(tmp_path_factory.mktemp("model"), CONFIG)


def _models(folder: Path) -> Models:
    return load_models(CONFIG, folder, alone())


def _checkpoints(tmp_path: Path, keep: int = 10) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", run_id="test", keep=keep, ranks=alone())


def _train(models: Models, seed: int) -> None:
    """One update of each model."""
    batch = make_batch(make_groups(CONFIG, seed))
    for t in models.trainees():
        for micro in micro_batches(batch, np.arange(len(batch)), Packing(4096)):
            out = t.module(micro)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        t.optimizer.step()
        t.optimizer.zero_grad()


def _digests(models: Models) -> list[str]:
    return [weights_digest(t.module) for t in models.trainees()]


def test_latest_is_the_largest_number(tmp_path: Path, folder: Path) -> None:
    c, models = _checkpoints(tmp_path), _models(folder)
    for step in (9, 100, 10):
        c.save(step, models, {})
    assert c.steps() == [9, 10, 100]
    assert c.latest() == tmp_path / "checkpoints" / "step_100"
    assert c.latest(at_most=99) == tmp_path / "checkpoints" / "step_10"
    assert c.latest(at_most=8) is None


def test_everything_comes_back(tmp_path: Path, folder: Path) -> None:
    c, models = _checkpoints(tmp_path), _models(folder)
    _train(models, 0)
    models.kl_controller.value = 0.25
    c.save(1, models, {"version": 1, "nested": {"a": [1, 2]}})
    at_save, random = _digests(models), torch.rand(4)
    for seed in (1, 2):
        _train(models, seed)
    unbroken = _digests(models)

    other = _models(folder)
    torch.manual_seed(99)
    state = c.load(c.latest(), other)
    assert (state["version"], state["nested"], state["step"]) == (1, {"a": [1, 2]}, 1)
    assert _digests(other) == at_save
    assert other.kl_controller.value == 0.25
    assert torch.equal(torch.rand(4), random)
    for seed in (1, 2):
        _train(other, seed)
    assert _digests(other) == unbroken  # the optimizers' moments and steps came back too


def test_a_crash_at_any_point_of_saving_leaves_the_last_one(tmp_path: Path, folder: Path) -> None:
    c, models = _checkpoints(tmp_path), _models(folder)
    c.save(1, models, {})
    for point in ("tensors", "written", "renamed"):
        failpoints.arm(f"learner.checkpoint.{point}:raise")
        with pytest.raises(RuntimeError, match="failpoint"):
            c.save(2, models, {})
        failpoints.arm("")
        expected = 2 if point == "renamed" else 1
        assert c.latest() == tmp_path / "checkpoints" / f"step_{expected}"
    c.save(2, models, {"again": True})
    assert c.load(c.latest(), models)["again"] is True
    assert [p.name for p in c.folder.iterdir() if p.name.startswith(".")] == []


def test_an_unfinished_folder_of_the_same_step_is_replaced(tmp_path: Path, folder: Path) -> None:
    c, models = _checkpoints(tmp_path), _models(folder)
    partial = c.folder / "step_3"
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"half")
    assert c.latest() is None
    assert c.save(3, models, {}) == partial
    verify(partial)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(
    tmp_path: Path, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    c, models = _checkpoints(tmp_path), _models(folder)
    c.save(1, models, {})
    path = c.save(2, models, {})
    victim = next(path.glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "cut":
        victim.write_bytes(content[:-1])
    elif damage == "remove":
        victim.unlink()
    else:
        victim = path / "planted.pkl"
        victim.write_bytes(b"")
    with pytest.raises(CheckpointError, match=victim.name):
        c.load(path, models)
    with caplog.at_level(logging.ERROR):
        assert c.latest() == c.folder / "step_1"
    assert victim.name in caplog.text


def test_old_ones_go_but_never_the_newest(tmp_path: Path, folder: Path) -> None:
    models = _models(folder)
    for keep, left in ((1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])):
        c = Checkpoints(tmp_path / str(keep), run_id="test", keep=keep, ranks=alone())
        for step in (1, 2, 3, 4):
            c.save(step, models, {})
        assert c.steps() == left


def test_a_checkpoint_of_another_run_or_other_models_is_refused(tmp_path: Path, folder: Path) -> None:
    models = _models(folder)
    path = _checkpoints(tmp_path).save(1, models, {})
    foreign = Checkpoints(tmp_path / "checkpoints", run_id="other", keep=1, ranks=alone())
    with pytest.raises(CheckpointError, match="belongs to run 'test'"):
        foreign.load(path, models)
    without = load_models(make_config(), folder, alone())
    other = _checkpoints(tmp_path / "b").save(1, without, {})
    with pytest.raises(CheckpointError, match="not of these models"):
        _checkpoints(tmp_path / "b").load(other, models)


def test_the_configs_own_numbers_stand_whatever_another_run_saved(tmp_path: Path, folder: Path) -> None:
    saved = load_models(make_config("actor.optim={weight_decay: 0.5, eps: 1e-4}"), folder, alone())
    _train(saved, 0)
    saved.kl_controller.value = 0.9
    path = _checkpoints(tmp_path).save(1, saved, {})
    config = make_config("actor.optim={weight_decay: 0, betas: [0.9, 0.95]}", "algorithm.kl_ctrl.kl_coef=0.5")
    models = load_models(config, folder, alone())
    _checkpoints(tmp_path).load(path, models)
    (group,) = models.actor.optimizer.param_groups
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0, (0.9, 0.95), 1e-8)
    assert models.kl_controller.value == 0.5, "a fixed one is the config's"
    assert models.actor.optimizer.state[models.actor.parameters[0]]["step"] == 1
    assert _digests(models) == _digests(saved)


def test_adapters_of_other_layers_are_refused(tmp_path: Path, folder: Path) -> None:
    wide = load_models(make_config("model.lora_rank=2"), folder, alone())
    path = _checkpoints(tmp_path).save(1, wide, {})
    narrow = load_models(make_config("model.lora_rank=2", "model.target_modules=[q_proj]"), folder, alone())
    with pytest.raises(CheckpointError, match="this run has"):
        _checkpoints(tmp_path).load(path, narrow)
