"""A rollback by decision: in the ledger, in the store, and by its program on a run's folder."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from broker.store import Store
from common.archive import Archive
from common.errors import FencedError, LedgerError, RolledBackError
from common.loading import load_config
from tests.recorded import Recorder, fresh_sample

ROOT = Path(__file__).resolve().parents[2]


def checkpoint(recorder: Recorder, step: int) -> None:
    """What a learner leaves: a folder, and a row."""
    folder = recorder.path.parent / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "tensors").write_bytes(b"weights of step %d" % step)
    digest = hashlib.sha256((folder / "tensors").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"files": {"tensors": {"bytes": 17, "sha256": digest}}}))
    recorder.ledger.checkpoint_valid(recorder.epoch, step, str(folder))


def recorded(folder: Path, *, steps: int = 5) -> Recorder:
    """Steps with a checkpoint after every second, two groups ready, one half done."""
    recorder = Recorder(folder)
    checkpoint(recorder, 0)
    for step in range(1, steps + 1):
        recorder.step()
        if step % 2 == 0:
            checkpoint(recorder, step)
    for num in (4, 4, 1):
        recorder.deliver(recorder.lease(), num=num)
    settings = ["model.toy=true", "data.task=reverse_digits", "data.train_batch_size=4", f"run.dir={folder}"]
    config = load_config([], settings)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return recorder


def roll_back(folder: Path, *step: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch.py"), "rollback", str(folder), *step]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_ledger_goes_on_above_what_it_gave_up(tmp_path: Path) -> None:
    recorder = recorded(tmp_path)
    ledger, old = recorder.ledger, recorder.epoch
    leased = ledger.leases_of("simulated")[0]
    ledger.validate(old, 5, 5, 3)
    ledger.validations[5].num_scored, ledger.validations[5].total = 1, 1.0  # one of three has come
    ready = ledger.counts["train"]["ready"]
    assert ledger.roll_back(2, who="me", at=0.0) == 6
    c = ledger.counters
    assert (c.version, c.step, c.floor, ledger.checkpoint, ledger.abandoned) == (6, 6, 6, 2, [(3, 5)])
    assert ledger.drops["rolled_back"].count == ready + 1 and ledger.outstanding == 0
    assert ledger.cancels == [("simulated", leased.key, "rolled_back")], "its generator is told"
    v = ledger.validations[5]
    assert v.done and (v.num_scored, v.total) == (0, 0.0), "nobody waits for weights that are gone, or scores a part"
    assert "older than the rollback to 6" in str(ledger.refusal(5))
    again = ledger.lease("simulated", "1", 6, 0.0)
    assert (again.prompt, again.attempt) == (min(a.prompt for a in ledger.live.values()), 1), "prompts are tried again"
    with pytest.raises(LedgerError, match="bad_version: 5 is older than the rollback to 6"):
        ledger.commit("simulated", header(again, oldest=5, newest=6), 0.0)
    for call in (lambda: ledger.claim(old, 7, 6, 4), lambda: ledger.checkpoint_valid(old, 4, "")):
        with pytest.raises(FencedError):
            call()
    with pytest.raises(RolledBackError, match=r"me rolled the run back.* the checkpoint of step 2"):
        ledger.claim(old, 7, 6, 4)
    assert ledger.roll_back(2, who="me again", at=0.0) == 7
    with pytest.raises(RolledBackError):
        ledger.claim(old, 8, 7, 4)
    new = ledger.attach("learner", "2")
    with pytest.raises(FencedError, match="has taken the run"):
        ledger.claim(old, 7, 6, 4)
    assert new == old + 2
    with pytest.raises(LedgerError, match="checkpoint of step 4 refused: a rollback gave that step up"):
        ledger.checkpoint_valid(new, 4, "")
    with pytest.raises(LedgerError, match="rollback to step 4 refused: its checkpoint is not valid; valid are: 0, 2"):
        ledger.roll_back(4, who="me", at=0.0)


def header(attempt, **changes):
    return {
        "group": attempt.group, "attempt": attempt.attempt, "index": 0, "crc": 0, "num_tokens": 1,
        "num_live_tokens": 1, "reward": 0.0, "truncated": False, "fault": None, **changes,
    }  # fmt: skip


def test_rollbacks_within_rollbacks_are_restored_as_they_were(tmp_path: Path) -> None:
    recorder = recorded(tmp_path)
    for to, abandoned in ((4, [(5, 5)]), (6, [(5, 5), (7, 8)]), (2, [(3, 9)])):
        recorder.ledger.roll_back(to, who="me", at=0.0)
        recorder.epoch = recorder.ledger.attach("learner", str(to))
        checkpoint(recorder, recorder.ledger.counters.step)
        assert recorder.ledger.abandoned == abandoned
        recorder.store.commit(recorder.ledger.take_changes())
        assert recorder.store.snapshot() == recorder.ledger.snapshot()
        for _ in range(2 if to == 4 else 0):
            recorder.acknowledge(recorder.claim(fresh_sample))
    surviving, found = [], recorder.store.step_after(0)
    while found is not None:
        surviving.append((found[0]["step"], found[0]["restored"]))
        found = recorder.store.step_after(surviving[-1][0])
    assert surviving == [(1, None), (2, None), (10, 2)]
    assert recorder.store.redo_bytes == 0
    recorder.close()


def test_the_program_decides_it_for_a_run_that_is_stopped(tmp_path: Path) -> None:
    recorded(tmp_path).close()
    done = roll_back(tmp_path)
    assert done.returncode == 0 and "checkpoints to go back to: 0, 2, 4" in done.stdout
    done = roll_back(tmp_path, "2")
    assert done.returncode == 0, done.stderr
    assert "rolled back to the checkpoint of step 2; steps 3 to 5 are given up; 3 groups dropped" in done.stdout
    assert "goes on with step 7 at version 6" in done.stdout
    store = Store(tmp_path / "ledger.sqlite", identity={})
    assert store.snapshot().abandoned == [(3, 5)]
    store.close()
    archive = Archive(tmp_path)
    found = dict(archive.rows(["step", "abandoned"], "state = 'trained'"))
    assert found == {1: 0, 2: 0, 3: 6, 4: 6, 5: 6}
    assert roll_back(tmp_path, "4").returncode == 2, "given up by an earlier rollback"


def test_checkpoints_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path).close()
    before = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT COUNT(*), MAX(version) FROM steps").fetchall()
    (tmp_path / "checkpoints" / "step_2" / "tensors").write_bytes(b"something else")
    done = roll_back(tmp_path, "2")
    assert done.returncode == 2 and "step_2/tensors: is damaged" in done.stderr
    for step, why in (("3", "step 3 has no valid checkpoint"), ("x", "invalid int value")):
        done = roll_back(tmp_path, step)
        assert done.returncode == 2 and why in done.stderr
    done = roll_back(tmp_path / "nowhere", "2")
    assert done.returncode == 2 and "no run here" in done.stderr
    after = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT COUNT(*), MAX(version) FROM steps").fetchall()
    assert after == before
