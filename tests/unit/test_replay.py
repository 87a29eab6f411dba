"""Replay: the record's steps to the bit, or its rollouts under another config; from a ledger and from parquet."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.archive import Archive
from common.config import Config
from common.errors import ReplayError, Stopped
from common.preflight import world_faults
from common.rollouts import Rollouts
from common.wire import Sample, decode_sample, encode_sample
from generators.records import main as records
from learner import resume
from learner.loop import Learner
from learner.models import load_models
from learner.replay import ExactFeed, LedgerRollouts, NullPublisher, OfflineFeed, open_replay, take_initial_weights
from tests.learner_parts import SimulatedControl, alone, make_config, make_learner
from tests.recorded import Recorder, RecorderFeed, fresh_sample, made_elsewhere, toy_sample

STEPS, SKIPPED = 6, 4  # rows, and the one among them that was skipped
FAULTY = (5, 0, 2)  # a sample whose reward failed; its group goes on without it


def made(*key: int, version: int) -> Sample:
    changes = {"fault": "reward_timeout", "reward": None} if key == FAULTY else {}
    return toy_sample(*key, version=version, **changes)


@dataclasses.dataclass
class Record:
    dir: Path
    digests: list[str]
    parquet: Path


@pytest.fixture(scope="module")
def record(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """What a real learner did with a Recorder's rollouts: another learning rate from step 3, step 4 skipped."""
    folder, config = tmp_path_factory.mktemp("record"), make_config()
    recorder, control = Recorder(folder), SimulatedControl()
    feed = RecorderFeed(recorder, make=made)
    learner = make_learner(config, load_models(config, weights, alone()), feed, folder, control=control)
    resume.resume(learner, feed.attach())
    for step in range(1, STEPS + 1):
        if step == 3:
            control.limits["actor.optim.lr"] = 3e-3
        if step == SKIPPED:
            recorder.step(applied=False)
            learner.progress.count_skipped()
        else:
            assert learner.step()
    recorder.close()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert records(["export", str(folder), str(folder / "all.parquet"), "--no-text"]) == 0
    return Record(folder, feed.digests, folder / "all.parquet")


@pytest.fixture
def replay(weights: Path, tmp_path: Path) -> Callable[..., tuple[Learner, list[str]]]:
    """A learner on a record, before its first step, and the digests it will have acknowledged."""

    def make(source: Path, *overrides: str, folder: str = "replay") -> tuple[Learner, list[str]]:
        config = make_config(f"replay.rollouts={source}", *overrides)
        learner = make_learner(
            config, load_models(config, weights, alone()), None, tmp_path / folder, publisher=NullPublisher()
        )
        feed = open_replay(config, start=learner.checkpoints.position(), stop=learner.stop, vocab_size=64)
        digests: list[str] = []
        acknowledge = feed.acknowledge

        def remember(**fields: Any) -> Any:
            digests.append(fields["digest"])
            return acknowledge(**fields)

        feed.acknowledge = remember  # type: ignore[method-assign]
        learner.feed = feed
        resume.resume(learner, feed.attach())
        return learner, digests

    return make


def altered(record: Record, tmp_path: Path, *statements: tuple[str, tuple[Any, ...]]) -> Path:
    """A copy of the record with changes."""
    copy = tmp_path / "altered"
    copy.mkdir()
    shutil.copy(record.dir / "ledger.sqlite", copy)
    with sqlite3.connect(copy / "ledger.sqlite") as db:
        for sql, values in statements:
            assert db.execute(sql, values).rowcount == 1
    return copy


# ---------------------------------------------------------------- exact
@pytest.mark.parametrize("kind", ["folder", "file", "parquet"])
def test_each_step_comes_out_to_the_bit(record: Record, replay: Any, kind: str) -> None:
    source = {"folder": record.dir, "file": record.dir / "ledger.sqlite", "parquet": record.parquet}[kind]
    learner, digests = replay(source)
    assert learner.run() == "the data ended"
    assert digests == record.digests and len(set(digests)) == STEPS - 1
    assert (learner.progress.step, learner.progress.version, learner.progress.skipped) == (STEPS, STEPS - 1, 1)
    lines = learner.writer.lines
    assert [lines[s]["actor/lr"] for s in sorted(lines)] == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3, 3e-3])
    assert lines[STEPS]["replay/num_equal_steps"] == STEPS - 1
    assert max(line["staleness/max"] for line in lines.values()) == 1  # the ages are those of the record


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_remax_comes_out_to_the_bit(weights: Path, tmp_path: Path, replay: Any, kind: str) -> None:
    """The last sample of each group is the greedy one, its baseline: recorded and replayed as such."""
    folder, remax = tmp_path / "record", "algorithm.adv_estimator=remax"
    config = make_config(remax, "run.max_steps=3")

    def make(*key: int, version: int) -> Sample:
        greedy = key[2] == config.greedy_index
        return toy_sample(*key, version=version, sampling={"temperature": 0.0 if greedy else 1.0})

    recorder = Recorder(folder, n=config.samples_per_group)
    feed = RecorderFeed(recorder, make=make)
    learner = make_learner(config, load_models(config, weights, alone()), feed, folder)
    resume.resume(learner, feed.attach())
    assert learner.run() == "max_steps reached"
    recorder.close()
    assert records(["export", str(folder), str(tmp_path / "all.parquet"), "--no-text"]) == 0
    again, digests = replay(folder if kind == "folder" else tmp_path / "all.parquet", remax)
    assert again.run() == "the data ended"
    assert digests == feed.digests and len(set(digests)) == 3
    assert again.progress.samples_trained == 3 * config.data.train_batch_size * config.rollout.n


def test_a_replay_that_is_started_again_goes_on_from_its_checkpoint(record: Record, replay: Any) -> None:
    first, before = replay(record.dir, "trainer.save_freq=2")
    for _ in range(3):
        first.step()
    second, after = replay(record.dir, "trainer.save_freq=2")  # killed after step 3; step 2 is on disk
    assert second.progress.step == 2
    assert second.run() == "the data ended"
    assert before[:2] + after == record.digests
    assert second.stats["replay/num_equal_steps"] == STEPS - 1


def first_payload(record: Record, step: int) -> tuple[int, dict[str, Any], bytes]:
    archive = Archive(record.dir)
    key = archive.step(step).keys[0]  # type: ignore[union-attr]
    header, payload = archive.samples(key)[0]
    archive.close()
    assert payload is not None
    return key[0] << 28 | key[1] << 16, header, payload


def test_a_byte_that_was_flipped_is_never_trained(record: Record, replay: Any, tmp_path: Path) -> None:
    name, _, payload = first_payload(record, 3)
    flipped = bytearray(payload)
    flipped[100] ^= 1
    source = altered(record, tmp_path, ("UPDATE payloads SET data = ? WHERE id = ?", (bytes(flipped), name)))
    learner, digests = replay(source)
    with pytest.raises(ReplayError, match=r"sample 8/0/0 is damaged .*checksum"):
        learner.run()
    assert digests == record.digests[:2]


def test_another_payload_is_reported_by_its_step(record: Record, replay: Any, tmp_path: Path) -> None:
    """The first token of one response is another, and the checksum is made to fit."""
    name, header, payload = first_payload(record, 3)
    sample = decode_sample(header, payload)
    ids = sample.response_ids.copy()
    ids[0] ^= 1
    changed = encode_sample(dataclasses.replace(sample, response_ids=ids))[1]
    source = altered(
        record, tmp_path, ("UPDATE payloads SET data = ? WHERE id = ?", (changed, name)),
        ("UPDATE samples SET crc = ? WHERE grp = ? AND attempt = 0 AND idx = 0", (zlib.crc32(changed), name >> 28)),
    )  # fmt: skip
    learner, _ = replay(source)
    with pytest.raises(ReplayError, match=r"step 3: the weights after it differ .*; 2 steps before were equal"):
        learner.run()


def test_other_live_settings_are_reported_by_their_step(record: Record, replay: Any, tmp_path: Path) -> None:
    source = altered(
        record, tmp_path,
        ("UPDATE steps SET settings = json_set(settings, '$.\"actor.optim.lr\"', 0.00301) WHERE step = ?", (5,)),
    )  # fmt: skip
    learner, _ = replay(source)
    with pytest.raises(ReplayError, match=r"step 5: the weights after it differ"):
        learner.run()


@pytest.mark.parametrize("source", ["dir", "parquet"])
def test_another_config_is_refused_before_anything_runs(record: Record, source: str, tmp_path: Path) -> None:
    def faults(*overrides: str) -> list[str]:
        return world_faults(make_config(f"replay.rollouts={getattr(record, source)}", *overrides))

    assert faults("run.max_steps=7", "trainer.save_freq=3", "generators.count=9", "run.id=other") == []
    found = faults("actor.optim.lr=2e-3", "actor.clip_ratio=0.1")
    assert "recorded with another config" in found[0]
    assert found[1:] == ["  actor.clip_ratio: 0.1 != 0.2", "  actor.optim.lr: 0.002 != 0.001"]
    scheduled = faults("actor.optim.lr_scheduler_type=cosine", "run.max_steps=7")
    assert any("run.max_steps" in f for f in scheduled)
    assert faults("replay.mode=offline", "actor.optim.lr=2e-3") == []


def test_a_record_that_is_not_there_is_refused(record: Record, tmp_path: Path) -> None:
    assert "no such file" in world_faults(make_config("replay.rollouts=/nowhere"))[0]
    assert "has no ledger.sqlite" in world_faults(make_config(f"replay.rollouts={tmp_path}"))[0]
    inside = world_faults(make_config(f"replay.rollouts={record.dir}", f"run.dir={record.dir}"))
    assert "choose another run.dir" in inside[0]
    elsewhere = made_elsewhere(tmp_path / "a.parquet")
    assert "not the steps of a run; set replay.mode=offline" in world_faults(
        make_config(f"replay.rollouts={elsewhere}")
    )[0]
    assert world_faults(make_config(f"replay.rollouts={elsewhere}", "replay.mode=offline")) == []
    short = made_elsewhere(tmp_path / "b.parquet", reward=None)
    found = world_faults(make_config(f"replay.rollouts={short}", "replay.mode=offline"))
    assert "no column reward" in found[0]


def test_a_record_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, keep_bytes=0)
    stop = threading.Event()
    with pytest.raises(ReplayError, match="no steps to replay"):
        ExactFeed(LedgerRollouts(tmp_path), start=(0, 0), stop=stop)
    recorder.step()
    recorder.ledger.checkpoint_valid(recorder.epoch, 1, "step_1")
    recorder.step()
    recorder.close()
    with pytest.raises(ReplayError, match=r"tokens of 1 steps \(1…1\) were freed"):
        ExactFeed(LedgerRollouts(tmp_path), start=(0, 0), stop=stop)


def test_what_a_rollback_gave_up_is_not_replayed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.ledger.checkpoint_valid(recorder.epoch, 0, "step_0")
    kept = recorder.step()
    recorder.ledger.checkpoint_valid(recorder.epoch, 1, "step_1")
    given_up = recorder.step()
    recorder.ledger.roll_back(1, who="me", at=0.0)
    recorder.close()
    with pytest.raises(ReplayError, match=r"row 3 is a rollback.*replay.mode=offline"):
        ExactFeed(LedgerRollouts(tmp_path), start=(0, 0), stop=threading.Event())
    there = {g.key for g in LedgerRollouts(tmp_path).complete_groups()}
    assert there == set(kept.keys) and not there & set(given_up.keys)


def test_what_a_rollback_gave_up_is_not_replayed_from_a_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    kept, given_up = recorder.step(), recorder.step()
    recorder.ledger.checkpoint_valid(recorder.epoch, 1, "step_1")
    recorder.ledger.roll_back(1, who="me", at=0.0)
    recorder.epoch = recorder.ledger.attach("learner", "2")
    after = recorder.claim(fresh_sample)
    recorder.acknowledge(after)
    recorder.close()
    assert records(["export", str(tmp_path), str(tmp_path / "all.parquet"), "--no-text"]) == 0
    source = Rollouts(tmp_path / "all.parquet")
    assert {g.key for g in source.complete_groups()} == {*kept.keys, *after.keys}
    assert source.left_out == {"abandoned": len(given_up.keys)}
    with pytest.raises(ReplayError, match="row 3 is a rollback"):
        ExactFeed(source, start=(0, 0), stop=threading.Event())


def test_the_weights_that_the_run_started_from_are_taken(weights: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    shutil.copytree(weights, recorded / "model")
    (recorded / "ledger.sqlite").write_bytes(b"SQLite format 3\0")
    made_elsewhere(recorded / "a.parquet")
    for source, mode, taken in (
        (recorded, "exact", True), (recorded / "ledger.sqlite", "exact", True),
        (recorded / "a.parquet", "exact", False), (recorded, "offline", False),
    ):  # fmt: skip
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        take_initial_weights(make_config(f"replay.rollouts={source}", f"replay.mode={mode}"), tmp_path)
        assert (tmp_path / "model").exists() == taken
    take_initial_weights(make_config(f"replay.rollouts={recorded}"), tmp_path)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- offline
def test_ledger_and_exported_file_train_to_the_same_weights(record: Record, replay: Any) -> None:
    """Another algorithm, learning rate and batch size than those that recorded; two epochs."""
    other = (
        "replay.mode=offline", "algorithm.adv_estimator=rloo", "actor.optim.lr=2e-3", "trainer.total_epochs=2",
        "data.train_batch_size=6", "actor.ppo_mini_batch_size=3",
    )  # fmt: skip
    by_ledger, digests = replay(record.dir, *other, folder="a")
    assert by_ledger.run() == "the data ended"
    by_file, again = replay(record.parquet, *other, folder="b")
    by_file.run()
    assert digests == again and len(set(digests)) == 8  # 20 groups in batches of 6, twice
    lines = by_ledger.writer.lines
    assert [lines[s]["staleness/max"] for s in range(1, 9)] == list(range(8))  # from the first weights on
    assert [lines[s]["training/epoch"] for s in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert lines[1]["rollout_corr/rollout_is_mean"] != 1.0


def test_a_run_that_is_started_again_sees_each_group_once_an_epoch(record: Record, replay: Any) -> None:
    seen: Counter[int] = Counter()

    def counted(learner: Learner) -> Learner:
        claim = learner.feed.claim

        def count(**fields: Any) -> Any:
            found = claim(**fields)
            seen.update(g.group for g in found.groups if found) if found else None
            return found

        learner.feed.claim = count
        return learner

    offline = ("replay.mode=offline", "trainer.total_epochs=1", "trainer.save_freq=1")
    unbroken, expected = replay(record.dir, *offline, folder="whole")
    unbroken.run()
    first, before = replay(record.dir, *offline)
    counted(first)
    first.step()
    first.step()
    second, after = replay(record.dir, *offline)
    counted(second).run()
    assert before + after == expected
    assert set(seen.values()) == {1} and len(seen) == 20


def test_order_is_of_seed_and_epoch(record: Record) -> None:
    def order(*overrides: str) -> list[int]:
        config = make_config(f"replay.rollouts={record.dir}", "replay.mode=offline", *overrides)
        feed = open_replay(config, start=(0, 0), stop=threading.Event(), vocab_size=64)
        return [g.group for step in range(1, 11) for g in feed.claim(step=step, version=0, num_groups=4).groups]  # type: ignore

    a, b, plain = order(), order("run.seed=1"), order("data.shuffle=false")
    assert sorted(a[:20]) == sorted(a[20:]) == plain[:20] == plain[20:] and len(set(a[:20])) == 20
    assert a[:20] != a[20:] and a != b and a == order()


def test_groups_that_do_not_fit_are_left_out_by_name(record: Record, replay: Any, tmp_path: Path) -> None:
    archive = Archive(record.dir)
    groups = {g for (g,) in archive.rows(["grp"], "state = 'trained'")}
    long = {g for (g,) in archive.rows(["grp"], "num_tokens > 7 AND state = 'trained'")}
    archive.close()
    damaged = min(groups - long)
    source = altered(record, tmp_path, ("UPDATE payloads SET data = zeroblob(9) WHERE id = ?", (damaged << 28,)))
    learner, _ = replay(source, "replay.mode=offline", "trainer.total_epochs=1", "data.max_response_length=7")
    learner.run()
    left_out = learner.stats["dropped"]
    assert left_out == {"damaged": 1, "response_too_long": len(long)} and long
    assert learner.progress.step == -(-(20 - len(long)) // 4)  # what is known to be too long takes no place in a batch
    trained = groups - long - {damaged}
    assert learner.progress.samples_trained == 4 * len(trained) - (FAULTY[0] in trained)


def test_single_samples_have_nothing_to_compare(replay: Any, tmp_path: Path) -> None:
    file = made_elsewhere(tmp_path / "a.parquet", 4, group=[0, 0, 1, 2])
    learner, _ = replay(file, "replay.mode=offline", "trainer.total_epochs=1")
    learner.run()
    assert learner.stats["dropped"] == {"single_sample": 2}
    alone_too, _ = replay(
        file, "replay.mode=offline", "trainer.total_epochs=1", "algorithm.adv_estimator=reinforce_plus_plus", folder="b"
    )
    alone_too.run()
    assert alone_too.progress.samples_trained == 4


def test_a_greedy_sample_is_a_baseline_and_no_row(replay: Any, tmp_path: Path) -> None:
    """Group 0 has one, group 1 has not, group 2 has nothing else."""
    file = made_elsewhere(
        tmp_path / "a.parquet", 7, group=[0, 0, 0, 1, 1, 2, 2], temperature=[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    )
    offline = ("replay.mode=offline", "trainer.total_epochs=1")
    learner, _ = replay(file, *offline, "algorithm.adv_estimator=remax")
    learner.run()
    assert learner.progress.samples_trained == 2
    assert learner.stats["dropped"] == {"no_baseline": 1, "single_sample": 1}
    learner, _ = replay(file, *offline, folder="b")
    learner.run()
    assert learner.progress.samples_trained == 4 and learner.stats["dropped"] == {"single_sample": 1}


def test_nothing_to_train_is_an_error_not_an_empty_run(replay: Any, tmp_path: Path) -> None:
    file = made_elsewhere(tmp_path / "a.parquet", lane=["eval"] * 4)
    with pytest.raises(ReplayError, match="no complete training group"):
        replay(file, "replay.mode=offline")
    with pytest.raises(ReplayError, match="no steps to replay"):
        replay(made_elsewhere(tmp_path / "b.parquet"))
    with pytest.raises(ReplayError, match="no complete training group"):
        replay(made_elsewhere(tmp_path / "c.parquet"), "replay.mode=offline", "data.max_response_length=2")


def test_a_batch_without_a_sound_group_is_passed_over(record: Record, replay: Any, tmp_path: Path) -> None:
    name, _, _ = first_payload(record, 1)
    damage = ("UPDATE payloads SET data = zeroblob(9) WHERE id = ?", (name,))
    small = ("replay.mode=offline", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "trainer.total_epochs=1")
    learner, _ = replay(altered(record, tmp_path, damage), *small)
    learner.run()
    assert (learner.progress.step, learner.progress.version, learner.progress.skipped) == (20, 19, 1)

    with sqlite3.connect(tmp_path / "altered" / "ledger.sqlite") as db:
        db.execute("UPDATE payloads SET data = zeroblob(9)")
    learner, _ = replay(tmp_path / "altered", *small, folder="b")
    with pytest.raises(ReplayError, match="a whole epoch without a group that can be trained"):
        learner.run()


def test_incomplete_and_held_out_groups_are_not_trained(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step()
    recorder.ledger.validate(recorder.epoch, 1, 1, 1)
    recorder.deliver(recorder.lease())
    recorder.deliver(recorder.lease(), num=2)
    recorder.deliver(recorder.lease(), lambda *k, version: toy_sample(*k, version=version))
    recorder.close()
    config = make_config(f"replay.rollouts={tmp_path}", "replay.mode=offline")
    feed = OfflineFeed(LedgerRollouts(tmp_path), config, start=(0, 0), stop=threading.Event())
    assert feed._keys == [(0, 0), (1, 0), (2, 0), (3, 0), (6, 0)]


def test_a_stop_is_seen_at_the_next_claim(record: Record, replay: Any) -> None:
    learner, _ = replay(record.dir)
    learner.step()
    learner.stop.set()
    with pytest.raises(Stopped):
        learner.feed.claim(step=2, version=1, num_groups=4)


def test_prompts_are_not_needed(tmp_path: Path) -> None:
    base = ["model.toy=true", "run.id=x", "actor.ppo_max_token_len_per_gpu=2048"]
    from common.loading import examine_config

    def faults(*overrides: str) -> list[str]:
        return examine_config([], [*base, *overrides])[1]

    assert faults("replay.rollouts=a.parquet") == []
    assert "train_files" in faults()[0]
    assert "model.warmup.steps=5" in faults("replay.rollouts=a.parquet", "model.warmup.steps=5")[0]
    assert isinstance(Config().replay.rollouts, type(None))
