"""Publishing to processes that fill tensors, over the real sockets and groups; ten buckets a version."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import learner.publish
import learner.version
from common.canary import Canary
from common.config import Weights
from common.errors import ConfigError, DeadlineError, FencedError, WeightError
from common.transfer import GlooGroup
from learner.publish import Publisher
from learner.version import Version

TIMEOUT_S = 2.0
CONFIG = Weights(bucket_bytes=1 << 16, timeout_s=TIMEOUT_S)
PATIENT = CONFIG.model_copy(update={"timeout_s": 15.0})  # where no fault is to be timed: a busy machine is none
PATIENCE_S = 30.0  # deadline of what is to come
NUM_BUCKETS = 10


def weights_of(version: int, num_buckets: int = NUM_BUCKETS) -> list[tuple[str, torch.Tensor]]:
    """Ten tensors of almost a bucket each, and one odd one; all elements are ``version``."""
    tensors = [(f"layer.{i}", torch.full((127, 129), float(version))) for i in range(num_buckets - 1)]
    return [*tensors, ("odd", torch.full((3,), version, dtype=torch.bfloat16))]


def sum_of(version: int) -> float:
    return sum(float(t.double().sum()) for _, t in weights_of(version))


class Receiver:
    """A ``filling_receiver`` process and what it has printed."""

    def __init__(
        self, name: str, address_file: Path, failpoint: str = "", model: str = "", staging: str = "host"
    ) -> None:
        env = {**os.environ, "LEEWAY_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.filling_receiver", name, str(address_file), model, staging],
            stdout=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip
        self.name, self.staging = name, staging
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert "ready" in self.next(150)  # its imports, on a machine however busy

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def next(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        line = self._lines.get(timeout=timeout_s)
        assert line is not None, f"{self.name} ended"
        return line

    def wait_held(self, version: int, timeout_s: float = PATIENCE_S) -> list[int]:
        """Versions held until ``version`` came, each with the right contents."""
        seen: list[int] = []
        while not seen or seen[-1] < version:
            event = self.next(timeout_s)
            if self.staging == "none" and event["held"] < 0:
                continue  # torn while it was loaded
            assert event["sum"] == sum_of(event["held"]), f"{self.name} mixed or tore version {event['held']}"
            seen.append(event["held"])
        assert seen[-1] == version and seen == sorted(set(seen))
        return seen

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Bench:
    """One learner's publisher in this process, and receivers that find it through a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "address"
        self.notes: list[str] = []
        self.receivers: list[Receiver] = []
        self.publishers: list[Publisher] = []

    def publisher(self, epoch: int = 1, config: Weights = CONFIG) -> Publisher:
        p = Publisher(
            run_id="run", epoch=epoch, config=config, on_event=self.notes.append, folder=self.file.parent / "weights"
        )
        self.publishers.append(p)
        temporary = self.file.with_suffix(".new")
        temporary.write_text(p.address)
        temporary.replace(self.file)
        return p

    def receiver(self, name: str, failpoint: str = "", model: str = "", staging: str = "host") -> Receiver:
        r = Receiver(name, self.file, failpoint, model, staging)
        self.receivers.append(r)
        return r

    def wait_note(self, text: str, timeout_s: float) -> str:
        return until(lambda: next((n for n in self.notes if text in n), None), timeout_s, f"a note with {text!r}")

    def close(self) -> None:
        for r in self.receivers:
            r.close()
        for p in self.publishers:
            p.close()


def until(condition: Any, timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s} s for {what}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    b = Bench(tmp_path)
    yield b
    b.close()


def test_two_engines_get_each_version_and_a_third_joins_later(bench: Bench) -> None:
    publisher = bench.publisher(config=PATIENT)
    made: list[Any] = []
    usual = publisher._transports["gloo"].announce
    publisher._transports["gloo"].announce = lambda *args: made.append(args) or usual(*args)  # type: ignore
    publisher.publish(0, weights_of(0))  # nobody is there: kept for sending
    a, b = bench.receiver("a"), bench.receiver("b")
    assert a.wait_held(0) == [0] and b.wait_held(0) == [0]
    for version in (1, 2, 4):
        publisher.publish(version, weights_of(version))
        assert sorted(publisher.wait_held(version, timeout_s=PATIENCE_S, minimum=2)) == ["a", "b"]
    assert a.wait_held(4) == [1, 2, 4] and b.wait_held(4) == [1, 2, 4]
    c = bench.receiver("c")
    assert c.wait_held(4) == [4]
    publisher.wait_held(4, timeout_s=PATIENCE_S, minimum=3)  # until the learner has heard so
    assert {m.name: m.version for m in publisher.members()} == {"a": 4, "b": 4, "c": 4}
    assert publisher.stats()["weights/transfers"] == 9
    assert len(made) == 2  # a group with each, for versions 1, 2 and 4; version 0, and c's first, were snapshots
    for process in (os.getpid(), a.process.pid):  # control socket, rendezvous, groups
        listening = [s for s in psutil.Process(process).net_connections("inet") if s.status == psutil.CONN_LISTEN]
        assert {s.laddr.ip for s in listening} <= {"127.0.0.1"}


def test_a_group_is_kept_before_the_next_transfer_however_late_its_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, late, send = [], threading.Event(), Version.send

    def send_and_be_late(weights: Version, group: Any, *args: Any) -> None:
        send(weights, group, *args)
        if isinstance(group, GlooGroup):
            late.wait(2 * PATIENCE_S)

    monkeypatch.setattr(Version, "send", send_and_be_late)
    publisher = bench.publisher(config=PATIENT)
    usual = publisher._transports["gloo"].announce
    publisher._transports["gloo"].announce = lambda *args: made.append(args) or usual(*args)  # type: ignore
    a = bench.receiver("a")
    for version in range(3):
        publisher.publish(version, weights_of(version))
        assert a.wait_held(version) == [version]
        publisher.wait_held(version, timeout_s=PATIENCE_S)
    late.set()
    for version in range(3, 6):  # nor does the late thread touch the group that is in use
        publisher.publish(version, weights_of(version))
        assert a.wait_held(version) == [version]
    assert len(made) == 1, bench.notes


def test_everything_by_snapshots(bench: Bench) -> None:
    publisher = bench.publisher(config=CONFIG.model_copy(update={"transport": "snapshot"}))
    a, b = bench.receiver("a"), bench.receiver("b", "staging.bucket:5:stop")
    for version in range(4):
        publisher.publish(version, weights_of(version))
        a.wait_held(version)
    publisher.wait_held(3, timeout_s=3 * TIMEOUT_S)  # the frozen one is left out
    assert {m.name: m.transport for m in publisher.members()} == {"a": "snapshot"}
    b.send_signal(signal.SIGCONT)
    assert b.wait_held(3)[-1] == 3


def test_newer_supersedes_and_versions_never_mix(bench: Bench) -> None:
    publisher = bench.publisher()
    a = bench.receiver("a", "staging.bucket:1:delay=0.02")
    for version in range(30):
        publisher.publish(version, weights_of(version))
    seen = a.wait_held(29, 20)
    assert len(seen) < 30  # what was not yet on its way was skipped
    with pytest.raises(WeightError, match="not above 29"):
        publisher.publish(29, weights_of(29))


BUCKETS = range(1, NUM_BUCKETS + 1)
POINTS = ("member.prepare", *(f"staging.bucket:{i}" for i in BUCKETS), "staging.staged")
POINTS += ("member.staged", "member.swap", "member.held")
FAULTS = [(point, action, "host") for point in POINTS for action in ("kill", "stop")]
FAULTS += [(f"staging.bucket:{i}", action, "none") for i in BUCKETS for action in ("kill", "stop")]
LEARNER_POINTS = ["publish.prepare:2", "publish.group:2", *(f"publish.bucket:{NUM_BUCKETS + i}" for i in BUCKETS)]


def sampled(cases: Sequence[Any], count: int) -> list[Any]:
    """All cases as parameters, of which all but a seeded sample are for ``make soak``."""
    chosen = random.Random(5).sample(list(cases), count)
    return [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=() if c in chosen else pytest.mark.soak)
        for c in cases
    ]


@pytest.mark.parametrize(("point", "action", "staging"), sampled(FAULTS, 3))
def test_a_member_that_dies_or_freezes_holds_up_nobody(bench: Bench, point: str, action: str, staging: str) -> None:
    publisher = bench.publisher()
    a, bad = bench.receiver("a"), bench.receiver("bad", f"{point}:{action}", staging=staging)
    until(lambda: len(publisher.members()) == 2, 5, "both members")
    start = time.monotonic()
    publisher.publish(0, weights_of(0))
    a.wait_held(0, TIMEOUT_S)  # at once: it does not even wait for the timeout
    publisher.publish(1, weights_of(1))
    assert time.monotonic() - start < TIMEOUT_S  # nor does the learner
    a.wait_held(1, TIMEOUT_S)
    publisher.wait_held(1, timeout_s=3 * TIMEOUT_S)  # the other one is left out, and named
    assert time.monotonic() - start < 2.5 * TIMEOUT_S
    assert any("bad" in note for note in bench.notes[2:])
    assert [m.name for m in publisher.members()] == ["a"]
    if action == "stop":
        bad.send_signal(signal.SIGCONT)
        assert bad.wait_held(1)[-1] == 1  # heard of again: not left behind
    else:
        again = bench.receiver("bad")
        assert again.wait_held(1) == [1]


def test_a_torn_transfer_changes_nothing_and_is_sent_again(bench: Bench) -> None:
    publisher = bench.publisher()
    a = bench.receiver("a", "staging.bucket:14:raise")  # in the middle of the second version
    publisher.publish(0, weights_of(0))
    a.wait_held(0)
    publisher.publish(1, weights_of(1))
    assert a.wait_held(1) == [1]
    publisher.wait_held(1, timeout_s=5)
    assert [m.transport for m in publisher.members()] == ["snapshot"]  # after a failure
    publisher.publish(2, weights_of(2))
    assert a.wait_held(2) == [2]
    assert [m.transport for m in publisher.members()] == ["gloo"]
    assert "a" in bench.wait_note("version 1 not delivered", 5)
    assert "failpoint staging.bucket" in bench.wait_note("failpoint", 5)


@pytest.mark.parametrize("index", sampled(range(2, NUM_BUCKETS + 1), 2))
def test_without_staging_a_torn_transfer_leaves_nothing_held_until_the_version_comes_again(
    bench: Bench, index: int
) -> None:
    publisher = bench.publisher()
    a = bench.receiver("a", f"staging.bucket:{NUM_BUCKETS + index}:raise", staging="none")
    b = bench.receiver("b")
    publisher.publish(0, weights_of(0))
    assert a.wait_held(0) == [0] and b.wait_held(0) == [0]
    publisher.publish(1, weights_of(1))
    assert b.wait_held(1, TIMEOUT_S) == [1]
    assert a.next()["held"] == -1  # told at once, so that nobody leases to it
    assert a.wait_held(1) == [1]
    publisher.wait_held(1, timeout_s=TIMEOUT_S, minimum=2)
    assert "failpoint staging.bucket" in bench.wait_note("failpoint", 5)
    assert {m.name: m.transport for m in publisher.members()} == {"a": "snapshot", "b": "gloo"}
    publisher.publish(2, weights_of(2))
    assert a.wait_held(2) == [2] and b.wait_held(2) == [2]


def test_a_side_that_fails_between_question_and_answer_parks_nobody(bench: Bench, monkeypatch: Any) -> None:
    """The engine fails with PREPARE in its hands; then the learner with a beat in its."""
    publisher = bench.publisher(config=PATIENT)
    a = bench.receiver("a", "member.prepare:raise")
    until(lambda: publisher.members(), PATIENCE_S, "the member")
    publisher.publish(0, weights_of(0))
    assert "a: version 0 not delivered: it says: RuntimeError('failpoint member.prepare')" in bench.wait_note(
        "not delivered", PATIENCE_S
    )
    assert a.wait_held(0) == [0]

    def fail(*args: Any) -> Any:
        raise OSError("no such luck")

    monkeypatch.setattr(publisher._roster, "receive", fail)
    with pytest.raises(WeightError, match="can no longer be published: no such luck"):  # at the next beat
        publisher.wait_held(1, timeout_s=PATIENCE_S)
    new = bench.publisher(epoch=2, config=PATIENT)  # as the learner does that is started again
    new.publish(1, weights_of(1))
    assert a.wait_held(1) == [1]


def test_another_model_is_refused_by_tensor_name(bench: Bench) -> None:
    publisher = bench.publisher()
    a = bench.receiver("a")
    publisher.publish(0, weights_of(0))
    a.wait_held(0)
    publisher.publish(1, [(n, t) for n, t in weights_of(1) if n != "layer.4"])
    assert "tensor layer.4: nothing is sent, float32 [127, 129] was before" in bench.wait_note("layer.4", 5)
    publisher.publish(2, [(n, t.bfloat16()) for n, t in weights_of(2)])
    assert "tensor layer.0: bfloat16 [127, 129] is sent, float32 [127, 129]" in bench.wait_note("bfloat16", 5)
    publisher.publish(3, weights_of(3))
    assert a.wait_held(3) == [3]


def test_an_engine_of_another_model_is_refused_at_its_first_version_and_ends(bench: Bench) -> None:
    says = "tensor layer.4: the learner sends [127, 129], this engine's model has [127, 130]"
    shapes = {name: list(t.shape) for name, t in weights_of(0)}
    publisher = bench.publisher(config=PATIENT)
    a = bench.receiver("a", model=json.dumps(shapes))
    bad = bench.receiver("bad", model=json.dumps({**shapes, "layer.4": [127, 130]}))
    until(lambda: len(publisher.members()) == 2, PATIENCE_S, "both members")
    publisher.publish(0, weights_of(0))
    assert a.wait_held(0) == [0]
    assert bench.wait_note("bad: version 0 not delivered", PATIENCE_S).endswith(f"it says: {says}")
    assert bad.next()["error"] == f"{says}; start this generator with the learner's config and model"
    assert bad.process.wait(PATIENCE_S) == 2
    publisher.publish(1, weights_of(1))  # the run goes on with the other one
    assert a.wait_held(1) == [1] and publisher.wait_held(1, timeout_s=PATIENCE_S) == ["a"]


def test_a_changed_byte_is_found_by_its_tensor(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import learner.publish as publish

    publisher = bench.publisher()
    a = bench.receiver("a")
    sealed = publish.with_digests

    def with_one_wrong(buffer: Any, *follow: Any) -> Any:
        manifest = sealed(buffer, *follow)
        return replace(manifest, digests=(*manifest.digests[:6], manifest.digests[6] ^ 1, *manifest.digests[7:]))

    monkeypatch.setattr(publish, "with_digests", with_one_wrong)
    publisher.publish(0, weights_of(0))
    assert "tensor layer.6: the bytes received are not those sent" in bench.wait_note("layer.6", 5)
    monkeypatch.undo()
    publisher.publish(1, weights_of(1))
    assert a.wait_held(1) == [1]


def test_a_restarted_learner_takes_over_and_the_old_one_is_fenced(bench: Bench) -> None:
    old = bench.publisher(epoch=1)
    a = bench.receiver("a")
    old.publish(5, weights_of(5))
    a.wait_held(5)
    new = bench.publisher(epoch=2)
    until(lambda: [m.version for m in new.members()] == [5], 5, "the member at the new learner")
    new.publish(6, weights_of(6))
    assert a.wait_held(6) == [6]
    bench.file.write_text(old.address)  # a stale registry leads it back
    until(lambda: _is_fenced(old), 5, "the old learner to be fenced")
    with pytest.raises(FencedError, match="epoch 2"):
        old.publish(7, weights_of(7))


def _is_fenced(publisher: Publisher) -> bool:
    try:
        publisher.wait_held(0, timeout_s=0, minimum=99)
    except FencedError:
        return True
    except DeadlineError:
        return False
    return False


LEARNER = """
import sys, time
from pathlib import Path
from common.processes import die_with_parent
from learner.publish import Publisher
from tests.system.test_publish import CONFIG, weights_of
die_with_parent()
publisher = Publisher(run_id="run", epoch=1, config=CONFIG)
Path(sys.argv[1]).write_text(publisher.address)
publisher.publish(0, weights_of(0))
publisher.wait_held(0, timeout_s=20)
publisher.publish(1, weights_of(1))
time.sleep(60)
"""


@pytest.mark.parametrize("index", sampled(BUCKETS, 1))
def test_joining_while_a_transfer_runs(bench: Bench, index: int) -> None:
    publisher = bench.publisher()
    a = bench.receiver("a", f"staging.bucket:{index}:stop")
    until(lambda: publisher.members(), 5, "the member")
    address = bench.file.read_text()
    bench.file.unlink()  # the next one waits for a learner in the registry
    b = bench.receiver("b")
    publisher.publish(0, weights_of(0))
    until(lambda: psutil.Process(a.process.pid).status() == psutil.STATUS_STOPPED, 5, "the bucket")
    bench.file.write_text(address)
    b.wait_held(0, TIMEOUT_S)
    a.send_signal(signal.SIGCONT)
    assert a.wait_held(0)[-1] == 0
    publisher.publish(1, weights_of(1))
    publisher.wait_held(1, timeout_s=3 * TIMEOUT_S, minimum=2)


@pytest.mark.parametrize("index", sampled(BUCKETS, 1))
def test_leaving_while_a_transfer_runs(bench: Bench, index: int) -> None:
    publisher = bench.publisher(config=PATIENT)
    a, b = bench.receiver("a"), bench.receiver("b", f"staging.bucket:{index}:delay=5")
    until(lambda: len(publisher.members()) == 2, PATIENCE_S, "both members")
    publisher.publish(0, weights_of(0))
    until(lambda: any(m.name == "b" and m.state == "sending" for m in publisher.members()), PATIENCE_S, "the transfer")
    b.send_signal(signal.SIGTERM)
    bench.wait_note("b left", PATIENCE_S)
    assert "b: version 0 not delivered: it left" in bench.notes
    a.wait_held(0)
    assert publisher.wait_held(0, timeout_s=PATIENCE_S) == ["a"]
    assert b.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("point", sampled(LEARNER_POINTS, 2))
def test_the_learner_killed_in_a_transfer_is_replaced(bench: Bench, point: str) -> None:
    env = {**os.environ, "LEEWAY_FAILPOINT": f"{point}:kill", "OMP_NUM_THREADS": "1"}
    learner = subprocess.Popen([sys.executable, "-c", LEARNER, str(bench.file)], env=env)
    a = bench.receiver("a")
    a.wait_held(0, 60)
    assert learner.wait(10) == -signal.SIGKILL
    new = bench.publisher(epoch=2)
    new.publish(1, weights_of(1))
    assert a.wait_held(1, 2 * TIMEOUT_S) == [1]


def test_a_wait_names_who_does_not_hold_the_version(bench: Bench) -> None:
    publisher = bench.publisher()
    with pytest.raises(DeadlineError, match="version 3 to be held by 1 engines"):
        publisher.wait_held(3, timeout_s=0.1)
    bench.receiver("a")
    until(lambda: publisher.members(), 5, "the member")
    with pytest.raises(DeadlineError, match=r"a \(holds -1, idle\)"):
        publisher.wait_held(3, timeout_s=0.1)


def test_the_copy_out_is_all_that_the_caller_waits_for(bench: Bench) -> None:
    publisher = bench.publisher()
    bench.receiver("a", "staging.bucket:1:delay=0.1")
    until(lambda: publisher.members(), 5, "the member")
    start = time.monotonic()
    for version in range(3):
        publisher.publish(version, weights_of(version))
    assert time.monotonic() - start < 0.5  # one transfer takes a second
    publisher.wait_held(2, timeout_s=10)


@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_follow_the_copying_only_where_there_are_cores_for_both(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    sent, send = [], learner.version._send
    monkeypatch.setattr(
        learner.version, "_send", lambda group, data, what: (send(group, data, what), sent.append(what))
    )
    monkeypatch.setattr(learner.publish, "OVERLAPS", overlaps)
    publisher = bench.publisher(config=PATIENT)
    a = bench.receiver("a")
    publisher.publish(0, weights_of(0))
    assert a.wait_held(0) == [0]
    publisher.wait_held(0, timeout_s=PATIENCE_S)
    sent.clear()

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        first, *rest = weights_of(1)
        yield first
        yield rest[0]
        until(lambda: any(t.started for t in publisher._transfers.values()), PATIENCE_S, "the agreement")
        if overlaps:
            until(lambda: sent, PATIENCE_S, "the first bucket")
        yield from rest[1:]
        assert bool(sent) == overlaps

    publisher.publish(1, watched())
    assert a.wait_held(1) == [1] and len(sent) == NUM_BUCKETS + 1
    publisher.publish(2, [*weights_of(2), ("more", torch.ones(5))])  # found out with the last tensor: withdrawn
    bench.wait_note("tensor more: float32 [5] is sent, nothing was before", PATIENCE_S)
    publisher.publish(3, weights_of(3))
    assert a.wait_held(3) == [3]


def test_a_model_whose_canary_cannot_be_computed_is_a_fault_of_the_config(bench: Bench) -> None:
    publisher, calls = bench.publisher(), []

    def forward(tensors: Any) -> Any:
        calls.append(dict(tensors).keys())
        raise NotImplementedError("no such kernel on the CPU")

    publisher.prove_with(forward)
    publisher.publish(0, weights_of(0))
    with pytest.raises(ConfigError, match=r"model\.path: its forward on the CPU.*NotImplementedError: no such kernel"):
        publisher.make_canary()
    assert calls == [dict(weights_of(0)).keys()]


def test_a_canary_is_made_while_the_buckets_are_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine waits for its first byte until the learner has computed a forward."""
    sent, all_buckets, send = [], threading.Event(), learner.version._send

    def send_and_count(group: Any, data: torch.Tensor, what: str) -> None:
        assert what != "digests" or made, "complete for the engine before its canary"
        send(group, data, what)
        sent.append(what)
        if len(sent) == NUM_BUCKETS:
            all_buckets.set()

    def forward(tensors: Any) -> Canary:
        assert all_buckets.wait(PATIENCE_S), "no bucket is sent before the canary is there"
        made.append(dict(tensors).keys())
        return Canary((3, 4), (-1.0,), "float32")

    made: list[Any] = []
    monkeypatch.setattr(learner.version, "_send", send_and_count)
    publisher = bench.publisher(config=PATIENT)
    publisher.prove_with(forward)
    a = bench.receiver("a")
    publisher.publish(0, weights_of(0))
    assert a.wait_held(0, 2 * PATIENCE_S) == [0] and len(made) == 1
    assert sent[-1] == "digests" and publisher.stats()["weights/failures"] == 0


def test_slow_engines_give_way_when_their_transfers_hold_all_the_memory(bench: Bench) -> None:
    publisher = bench.publisher(config=PATIENT)
    # Each takes 3 s for every bucket, from its first version on, its second one, its third one.
    slow = [bench.receiver(f"slow{i}", f"staging.bucket:{i * NUM_BUCKETS + 1}:delay=3") for i in range(3)]
    until(lambda: len(publisher.members()) == 3, PATIENCE_S, "the members")
    for version in range(3):
        publisher.publish(version, weights_of(version))
        for receiver in slow[version + 1 :]:
            receiver.wait_held(version)
    until(
        lambda: [m.sending for m in publisher.members() if m.state == "sending"] == [0, 1, 2],
        PATIENCE_S, "three transfers",
    )  # fmt: skip
    publisher.publish(3, weights_of(3))
    assert bench.wait_note("too slow", PATIENCE_S).startswith("slow0: version 0 not delivered")
    assert not any("slow2" in note and "too slow" in note for note in bench.notes)
