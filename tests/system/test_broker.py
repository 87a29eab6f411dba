"""A real broker process, real sockets and a real Redis server; simulated generators, the learner's real feed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from broker.database import PAGE_BYTES
from common.control import Control, start_server
from common.errors import DeadlineError, FencedError, LedgerError, NoSignalError, Stopped
from common.processes import child_environment, spawn
from common.sockets import Dealer
from common.wire import encode, encode_sample
from learner.ahead import Ahead
from learner.feed import Feed
from tests.learner_parts import alone, initial_weights, make_config
from tests.several_ranks import run_on_ranks
from tests.simulated import SimulatedGenerator, make_sample, raw_answers

ROOT = Path(__file__).parents[2]
B, N = 4, 2
CONFIG = [
    "model.toy=true", "data.task=reverse_digits", f"data.train_batch_size={B}", f"rollout.n={N}", "data.val_size=5",
    "staleness.max=1", "actor.ppo_max_token_len_per_gpu=2048",
]  # fmt: skip
SETTINGS = {"actor.optim.lr": 1e-3}


class Run:
    """A run that consists of Redis, a broker and what the test adds."""

    def __init__(self, folder, url):
        self.id = f"run-{time.time_ns()}"
        self.dir, self.url, self.brokers, self.generators, self.controls, self.feeds = folder, url, [], [], [], []
        self.control = self._connect()

    def _connect(self):
        control = Control(self.url, self.id)
        self.controls.append(control)
        return control

    def broker(self, *overrides, failpoint="", wait=True):
        env = child_environment({"LEEWAY_FAILPOINT": failpoint, "LEEWAY_REDIS_URL": self.url})
        argv = [sys.executable, "-m", "broker", "--run-id", self.id, f"run.dir={self.dir}", *CONFIG, *overrides]
        process = spawn(argv, env=env, cwd=str(ROOT), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.brokers.append(process)
        if wait:
            wait_for(lambda: self._is_registered(process), "the broker in the registry", 20)
        return process

    def _is_registered(self, process):
        assert process.poll() is None, process.stderr.read().decode()
        self.control.refresh()
        entry = self.control.entry("broker")
        return entry is not None and entry.pid == process.pid and entry.address

    def address(self):
        entry = self.control.entry("broker")
        return entry.address if entry else None

    def generator(self, name, *, registered=True, **options):
        if registered:
            self._connect().register("generator", name)
            self.control.refresh()
        generator = SimulatedGenerator(self.address, self.id, name, **options)
        self.generators.append(generator)
        return generator

    def feed(self, name="learner", *, stop=None, timeout_s=20.0, address=None):
        feed = Feed(
            address or self.address, run_id=self.id, name=name, stop=stop or threading.Event(), timeout_s=timeout_s
        )
        self.feeds.append(feed)
        return feed

    def query(self, sql):
        db = sqlite3.connect(f"file:{self.dir}/ledger.sqlite?mode=ro", uri=True)
        try:
            return db.execute(sql).fetchall()
        finally:
            db.close()

    def close(self):
        for generator in self.generators:
            generator.close()
        for feed in self.feeds:
            feed.close()
        for process in self.brokers:
            process.kill()
            process.wait()
            process.stderr.close()
        for control in self.controls:
            control.close()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    url, process = start_server(tmp_path_factory.mktemp("redis"))
    yield url
    process.kill()
    process.wait()


@pytest.fixture
def run(tmp_path, redis_url):
    run = Run(tmp_path, redis_url)
    yield run
    run.close()


def wait_for(condition, what, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {timeout_s} s"
        time.sleep(0.02)


def train(feed, *, steps, version=None, first=None, generators=(), look_ahead=False, checkpoint_every=0, delay_s=0.0):
    """Steps of a learner that does nothing with its batches; generators get each version at once."""
    attached = feed.attach() if first is None else None
    step, version = (attached.step + 1, attached.version) if attached else (first, version)
    stop, ahead = threading.Event(), Ahead(feed.another(), alone()) if look_ahead else None
    last = step + steps - 1
    for _ in range(steps):
        if ahead is not None and ahead.step == step:
            claim = ahead.claim(stop=stop, on_wait=lambda reason: None)
            ahead.part(claim, stop=stop)
        else:
            claim = feed.claim(step=step, version=version, num_groups=B)
        if ahead is not None and step < last:
            ahead.order(step=step + 1, version=version + 1, num_groups=B)
        samples = feed.fetch(claim)
        assert len(samples) == B * N and max(version - s.behavior_versions.min() for s in samples) <= claim.limit
        now = time.time()
        stepped = feed.acknowledge(
            step=step, applied=True, reason="", settings=SETTINGS, digest=f"d{step}", optimizer_span=[now - 0.01, now]
        )
        assert stepped.version == version + 1
        if checkpoint_every and step % checkpoint_every == 0:
            feed.checkpoint_valid(step=step, path=f"step_{step}")
        step, version = step + 1, version + 1
        for generator in generators:
            generator.version = version
        time.sleep(delay_s)
    if ahead is not None:
        ahead.close()
    return stepped


def test_samples_become_steps_and_the_ledger_can_be_asked(run):
    run.broker()
    generators = [run.generator("generator-a"), run.generator("generator-b", delay_s=0.02)]
    feed = run.feed()
    stepped = train(feed, steps=12, generators=generators)
    states = stepped.stats["states"]
    assert states["trained"] == 12 * B and sum(states.values()) == stepped.stats["issued"]
    assert set(stepped.stats["versions"]) == {"generator-a", "generator-b"}
    rows = run.query("SELECT step, version, applied, digest FROM steps ORDER BY step")
    assert rows == [(i, i - 1, 1, f"d{i}") for i in range(1, 13)]
    ages = run.query(
        "SELECT MIN(trained_at - sampled_at), MAX(trained_at - sampled_at), SUM(num_tokens) FROM trained_tokens"
    )
    assert 0 <= ages[0][0] <= ages[0][1] <= 1 and ages[0][2] == 12 * B * N * 6
    assert run.query("SELECT COUNT(*) FROM attempts WHERE state = 'trained' AND generator = 'generator-b'")[0][0] > 0
    wait_for(lambda: feed.status().get("generator/overlap_ratio") == pytest.approx(1.0, abs=1e-3), "overlap of 1")


def test_killed_brokers_lose_nothing_acknowledged_and_train_nothing_twice(run):
    """At each of these points the broker kills itself under load; the run goes on with the next one."""
    kill_at_each_point(run, repeats=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_brokers_killed_twenty_times_at_each_point_lose_nothing(run):
    kill_at_each_point(run, repeats=20)


def kill_at_each_point(run, *, repeats):
    points = repeats * [
        "broker.before_commit:40", "broker.after_commit:40", "broker.before_send:40", "broker.after_send:40",
        "broker.during_claim:2", "broker.during_compaction:1",
    ]  # fmt: skip
    steps, bounds = 10 * len(points), ("ledger.keep_bytes=0",)  # a checkpoint takes payloads with it
    run.broker(*bounds, failpoint=points[0])
    generators = [run.generator(f"generator-{i}", delay_s=0.005, duplicate=2) for i in range(2)]
    feed, done = run.feed(timeout_s=60), threading.Event()

    def work():
        train(feed, steps=steps, generators=generators, look_ahead=True, checkpoint_every=2)
        done.set()

    learner = threading.Thread(target=work, daemon=True)
    learner.start()
    for following in [*points[1:], ""]:
        process = run.brokers[-1]
        wait_for(lambda p=process: p.poll() == -signal.SIGKILL, "kill by the failpoint", 30)
        run.broker(*bounds, failpoint=following)
    assert done.wait(60 * repeats)
    wait_for(lambda: all(not g._unacked for g in generators), "acknowledgement of everything")
    stored = set(run.query("SELECT grp, attempt, idx FROM samples"))
    acked = set().union(*(g.acked for g in generators))
    late = {key for key in acked - stored if run.query(
        f"SELECT 1 FROM attempts WHERE grp = {key[0]} AND attempt = {key[1]} AND state = 'dropped'")}  # fmt: skip
    assert acked - stored == late  # what is not stored came after its group was dropped
    trained = run.query("SELECT grp, COUNT(*) FROM attempts WHERE state = 'trained' GROUP BY grp HAVING COUNT(*) > 1")
    assert trained == [] and run.query("SELECT COUNT(*) FROM steps")[0][0] == steps
    assert run.query("SELECT COUNT(*) FROM attempts WHERE state = 'trained'")[0][0] == steps * B
    assert run.query("SELECT COUNT(*) FROM trained_tokens WHERE trained_at - sampled_at > staleness_limit") == [(0,)]


def test_duplicates_any_order_and_a_generator_that_returns_train_nothing_twice(run):
    """Everything comes twice, in any order within 64 messages, also from one whose leases went to another."""
    run.broker("ledger.lease_timeout_s=0.6")
    returning = run.generator("generator-late", deaf=True, duplicate=2, reorder=64)
    returning.paused.set()
    wait_for(lambda: returning.seen["lease"] >= B, "leases of the one that stops")
    others = [run.generator(f"generator-{i}", duplicate=2, reorder=64) for i in range(2)]
    wait_for(lambda: returning.cancelled, "end of its leases")
    returning.paused.clear()  # it sends what it was told to forget
    feed = run.feed()
    stepped = train(feed, steps=25, generators=[*others, returning])
    assert stepped.stats["queue/late_samples"] > 0 and stepped.stats["queue/duplicate_samples"] > 25 * B
    rows = run.query("SELECT grp, COUNT(*), COUNT(DISTINCT step) FROM attempts WHERE state = 'trained' GROUP BY grp")
    assert len(rows) == 25 * B and {row[1:] for row in rows} == {(1, 1)}
    assert run.query(
        "SELECT COUNT(*) FROM samples s JOIN attempts a USING (grp, attempt) WHERE a.state = 'trained' AND "
        "a.num_leases = 1 AND s.generator != a.generator"
    ) == [(0,)]  # fmt: skip


def test_a_slow_learner_holds_the_generators_up_and_nobodys_memory_grows(run):
    slow_learner(run, seconds=8.0)


@pytest.mark.soak
def test_a_slow_learner_for_a_minute(run):
    slow_learner(run, seconds=60.0)


def slow_learner(run, *, seconds):
    """A learner at full speed, then ten times slower, then at full speed again."""
    process = psutil.Process(run.broker("staleness.max=3", "ledger.untrained_bytes=6000").pid)
    generators = [run.generator(f"generator-{i}") for i in range(2)]
    feed, num = run.feed(), 30
    start = time.monotonic()
    stepped = train(feed, steps=num, generators=generators)
    full_s = (time.monotonic() - start) / num
    before, end, step = process.memory_info().rss, time.monotonic() + seconds, num
    bounds = []
    while time.monotonic() < end:
        stepped = train(feed, steps=1, first=step + 1, version=step, generators=generators, delay_s=9 * full_s)
        bounds.append(stepped.stats["queue/untrained_bytes"])
        step += 1
    assert process.memory_info().rss - before < 16e6
    assert max(bounds) < 6_000 + 4 * B * N * 600  # what was leased when the bound was reached still comes
    assert any(reason.startswith("untrained data") for g in generators for reason in g.wait_reasons)
    assert all(len(g._unacked) <= 4 * B * N for g in generators)
    start = time.monotonic()
    stepped = train(feed, steps=num, first=step + 1, version=step, generators=generators)
    assert time.monotonic() - start < 5.0 + 2 * num * full_s
    states = stepped.stats["states"]
    assert states["trained"] == (step + num) * B and sum(states.values()) == stepped.stats["issued"]


def test_a_second_learner_fences_the_first_and_redoes_its_rows(run):
    run.broker()
    generator = run.generator("generator-a")
    first = run.feed("learner")
    train(first, steps=3, generators=[generator])
    claimed = first.claim(step=4, version=3, num_groups=B)
    second = run.feed("learner")
    attached = second.attach()
    assert (attached.epoch, attached.step, attached.version, attached.checkpoint) == (2, 3, 3, -1)
    with pytest.raises(FencedError, match="epoch 1 is over"):
        first.acknowledge(step=4, applied=True, reason="", settings={}, digest="", optimizer_span=[0, 0])
    rows = second.rows(after=1)
    assert [(r.step, r.version, r.digest, r.settings) for r in rows] == [(2, 1, "d2", SETTINGS), (3, 2, "d3", SETTINGS)]
    redone = second.fetch(rows[0].claim)
    assert [len(redone), redone[0].group] == [B * N, rows[0].claim.groups[0].group]
    again = second.claim(step=4, version=3, num_groups=B)
    assert [g.group for g in again.groups] == [g.group for g in claimed.groups]  # its claim was returned by the attach
    second.give_back(step=4, reason="test")
    with pytest.raises(LedgerError, match="claim of step 6 at version 3 refused: the next is step 4 at version 3"):
        second.claim(step=6, version=3, num_groups=B)


def test_a_second_broker_on_the_same_ledger_is_refused(run):
    first = run.broker()
    second = run.broker(wait=False)
    _, stderr = second.communicate(timeout=20)
    assert second.returncode == 1
    assert f"another broker (pid {first.pid}) has this ledger; end it first" in stderr.decode().splitlines()[-1]


def test_a_damaged_ledger_is_refused_by_name(run):
    process = run.broker()
    train(run.feed(), steps=2, generators=[run.generator("generator-a")])
    process.terminate()
    process.wait()  # a clean end: everything is in the file itself, nothing in its log
    path = run.dir / "ledger.sqlite"
    with open(path, "r+b") as file:
        file.seek(2 * PAGE_BYTES)
        file.write(os.urandom(PAGE_BYTES))
    process = run.broker(wait=False)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"{path}: the ledger is damaged" in stderr.decode().splitlines()[-1]


def test_learner_waits_by_name_and_registry_matters(run):
    run.broker()
    feed, reasons = run.feed(), []
    feed.attach()
    generator = None

    def on_wait(reason):
        nonlocal generator
        reasons.append(reason)
        if "no generator is connected" in reason and generator is None:
            generator = run.generator("generator-a", registered=False)
        elif "has no registry entry" in reason:
            run._connect().register("generator", "generator-a")

    claim = feed.claim(step=1, version=0, num_groups=B, on_wait=on_wait)
    assert len(claim.groups) == B
    assert reasons[0] == "0 of 4 groups are ready for step 1; no generator is connected"
    assert any("generator-a: generator generator-a has no registry entry" in r for r in reasons)
    assert "generator generator-a has no registry entry" in generator.wait_reasons


def test_leases_of_a_killed_generator_go_to_another(run):
    run.broker("ledger.lease_timeout_s=2", "staleness.max=0")
    dead = run.generator("generator-dead")
    dead.paused.set()
    wait_for(lambda: dead.seen["lease"] == B, "all leases at the first generator")
    dead.close()  # without a word
    feed, reasons = run.feed(), []
    feed.attach()
    run.generator("generator-b")
    claim = feed.claim(step=1, version=0, num_groups=B, on_wait=reasons.append)
    assert {g.attempt for g in claim.groups} == {1}
    assert any("to generator-dead" in r for r in reasons)  # the wait names who holds the oldest lease
    dropped = run.query("SELECT reason, COUNT(*) FROM attempts WHERE state = 'dropped' GROUP BY reason")
    assert dropped in ([("lease_expired", B)], [("generator_lost", B)])


def test_samples_of_a_killed_generator_are_kept_and_only_the_rest_is_made_again(run):
    run.broker("ledger.lease_timeout_s=2", "staleness.max=0")
    made: list[int] = []

    def half(group, attempt, index, *, version):
        made.append(index)
        return make_sample(group, attempt, index, version=version, generator="dead" if index == 0 else "late")

    dead = run.generator("generator-dead", make=half, only={0})
    wait_for(lambda: len(dead.acked) == B, "half of each group")
    dead.close()  # without a word
    feed = run.feed()
    feed.attach()
    other = run.generator("generator-b")
    claim = feed.claim(step=1, version=0, num_groups=B)
    samples = feed.fetch(claim)
    assert {g.attempt for g in claim.groups} == {0} and {s.index: s.generator for s in samples} == {
        0: "dead", 1: "simulated"
    }  # fmt: skip
    assert {index for *_, index in other.acked} == {1} and set(made) == {0}
    assert run.query("SELECT state, num_leases, COUNT(*) FROM attempts WHERE grp < 4 GROUP BY 1, 2") == [
        ("claimed", 2, B)
    ]  # fmt: skip
    assert feed.status()["queue/leased_again"] == B


def test_bye_restart_and_cancel(run):
    run.broker("staleness.max=0")
    gone = run.generator("generator-a")
    gone.paused.set()
    wait_for(lambda: gone.seen["lease"] == B, "leases")
    gone.close(bye=True)
    other = run.generator("generator-b")
    other.paused.set()
    wait_for(lambda: other.seen["lease"] == B, "the leases of the one that left")
    successor = run.generator("generator-b", registered=False)  # the same name, another process
    wait_for(lambda: successor.seen["acks"], "samples of the successor")
    wait_for(lambda: other.seen["refused"], "refusal of the older process")
    assert run.query("SELECT reason, COUNT(*) FROM attempts WHERE state = 'dropped' GROUP BY reason") == [
        ("generator_left", B), ("generator_restarted", B)
    ]  # fmt: skip


def test_validation_on_generators_beside_training(run):
    run.broker()
    run.generator("generator-a", make=lambda *key, version: make_sample(*key, version=version, reward=0.25))
    feed = run.feed()
    feed.attach()
    feed.validate(step=0, version=0)
    feed.validate(step=0, version=0)  # repeating it changes nothing
    wait_for(feed.validations, "the result")
    assert feed.validations() == [{"step": 0, "version": 0, "score": 0.25, "num_samples": 5, "num_dropped": 0}]
    assert feed.claim(step=1, version=0, num_groups=B).groups[0].headers[0]["reward"] == 0.25


def test_dynamic_sampling_drops_what_has_no_signal_and_says_when_nothing_else_comes(run):
    run.broker("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=5")
    mixed = run.generator("generator-a", make=lambda g, a, i, *, version: make_sample(
        g, a, i, version=version, reward=float(i if g % 3 else 1)))  # fmt: skip
    feed = run.feed()
    train(feed, steps=3, generators=[mixed])
    assert run.query("SELECT COUNT(*) FROM attempts WHERE state = 'trained' AND grp % 3 = 0") == [(0,)]
    assert run.query("SELECT COUNT(*) > 0 FROM attempts WHERE reason = 'no_signal'") == [(1,)]
    mixed._make = lambda g, a, i, *, version: make_sample(g, a, i, version=version, reward=0.0)
    with pytest.raises(NoSignalError, match="groups in a row had equal rewards only"):
        train(feed, steps=9, first=4, version=3, generators=[mixed])


def test_malformed_messages_are_refused_with_a_reason_and_counted(run):
    run.broker("staleness.max=0")
    address = run.address()
    hello = encode("hello", run=run.id, name="generator-x", incarnation="1", version=0)
    bad = [
        [b"\xc1"], [encode("hello", run=run.id)[0]], encode("no_such"), encode("welcome", version=0, floor=0),
        encode("heartbeat", version=0, capacity=1, progress=[["a"]], sampling=[], stats={}),
        encode("row", id=1, epoch=0, after=0), encode_sample(make_sample()),
    ]  # fmt: skip
    answers = raw_answers(address, b"x", [*bad, hello, *bad], until=lambda op, f: f.get("re") == "sample", timeout_s=10)
    reasons = [f["reason"] for op, f in answers if op == "refused"]
    assert reasons[:6] == [
        "not_msgpack",
        "missing_field",
        "unknown_op",
        "unknown_op",
        "unknown_generator",
        "unknown_generator",
    ]
    assert raw_answers(address, b"y", [encode("hello", run="other", name="g", incarnation="1", version=0)],
                       until=lambda op, f: f.get("reason") == "other_run")  # fmt: skip
    assert run.feed().status()["refused"]["not_msgpack"] >= 2
    generator = run.generator("generator-a", make=lambda *key, version: make_sample(*key, version=version + 1))
    wait_for(
        lambda: any(reason == "bad_version" for *_, reason in generator.cancelled), "refusal of an unknown version"
    )


def test_stop_ends_the_feed_and_the_broker(run):
    process = run.broker()
    generator = run.generator("generator-a")
    generator.paused.set()
    wait_for(lambda: generator.seen["lease"], "a lease")
    stop = threading.Event()
    feed = run.feed(stop=stop)
    feed.attach()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Stopped):
        feed.claim(step=1, version=0, num_groups=B)
    process.terminate()
    assert process.wait(timeout=5) == 0
    assert run.query("SELECT DISTINCT state, reason FROM attempts ORDER BY state") == [
        ("dropped", "shutdown"), ("pending", None)
    ]  # fmt: skip
    with pytest.raises(DeadlineError, match=r"the broker's answer to attach \(tcp://127.0.0.1:1\)"):
        run.feed(address="tcp://127.0.0.1:1", timeout_s=0.5).attach()


def test_short_last_batch_and_the_end_of_the_data(run, tmp_path):
    rows = ROOT / "tests" / "unit" / "test_data.py"
    assert rows.exists()
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}\n'
        * 6
    )
    run.broker("data.task=null", f"data.train_files={path}", "trainer.total_epochs=1")
    generator = run.generator("generator-a")
    feed = run.feed()
    train(feed, steps=1, generators=[generator])
    claim = feed.claim(step=2, version=1, num_groups=B)
    assert claim.short and len(claim.groups) == 2
    feed.acknowledge(step=2, applied=True, reason="", settings={}, digest="", optimizer_span=[0, 0])
    assert feed.claim(step=3, version=2, num_groups=B) is None


def test_the_broker_does_not_read_a_flood_of_frames(run):
    run.broker()
    dealer = Dealer(run.address(), b"flood")
    dealer.send([b"x"] * 20_000)
    dealer.close(linger_s=5.0)
    wait_for(lambda: run.feed().status()["refused"].get("too_many_frames"), "refusal of the flood")


def test_checkpoints_free_payloads_beyond_what_is_kept(run):
    run.broker("ledger.keep_bytes=0", "ledger.redo_bytes=4000")
    generator = run.generator("generator-a")
    feed = run.feed()
    stepped = train(feed, steps=2, generators=[generator])
    assert stepped.checkpoint_wanted
    with pytest.raises(LedgerError, match="checkpoint of step 3 refused"):
        feed.checkpoint_valid(step=3, path="somewhere")
    rows = feed.rows(after=0)
    feed.checkpoint_valid(step=1, path="checkpoints/step_1")
    with pytest.raises(LedgerError, match=r"the payload of sample .* is gone"):
        feed.fetch(rows[0].claim)
    assert len(feed.fetch(rows[1].claim)) == B * N
    assert run.query("SELECT step, payloads_kept FROM steps ORDER BY step") == [(1, 0), (2, 1)]
    feed.checkpoint_valid(step=2, path="checkpoints/step_2")
    assert not train(feed, steps=1, first=3, version=2, generators=[generator]).checkpoint_wanted


def shares_of(run, folder, *extra, steps, failpoint=""):
    """What each of two ranks saw; the generator gets no newer weights, so the limit is wide. A broker that kills
    itself at ``failpoint`` is followed by another one."""
    config = make_config(*CONFIG, "staleness.max=9")
    weights = initial_weights(folder / "weights", config)
    first = run.broker("staleness.max=9", failpoint=failpoint)
    run.generator("generator-a")
    with ThreadPoolExecutor(1) as pool:  # the brokers are children of this thread: they end with it
        ranks = pool.submit(
            run_on_ranks, 2, "tests.share_program", "train", str(folder), run.address(), run.id, str(weights),
            str(run.dir / "ledger.sqlite"), str(steps), *extra, *CONFIG, "staleness.max=9", within_s=100,
        )  # fmt: skip
        if failpoint:
            assert first.wait(60) == -signal.SIGKILL
            run.broker("staleness.max=9")
        ranks.result()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_fetches_its_own_share_and_every_payload_crosses_once(run, tmp_path):
    steps = 4
    seen = shares_of(run, tmp_path, steps=steps)
    assert [s["ended"] for s in seen] == ["max_steps reached"] * 2 and seen[0]["digest"] == seen[1]["digest"]
    batches = dict(run.query("SELECT step, group_keys FROM steps"))
    for step in range(1, steps + 1):
        parts = [[key for number, *key, _ in s["fetched"] if number == step] for s in seen]
        assert all(parts) and parts[0] + parts[1] == json.loads(batches[step])
        assert {a for s in seen for number, *_, a in s["fetched"] if number == step} == {step > 1}  # ahead of its step
    own = [len(s["fetched"]) * N for s in seen]
    assert sum(own) == steps * B * N
    assert seen[0]["status"]["fetched"] == {"learner": own[0], "learner-rank1": own[1]}


def test_a_share_that_one_rank_cannot_fetch_ends_the_step_on_both(run, tmp_path):
    seen = shares_of(run, tmp_path, "gone", steps=4)
    for s in seen:
        assert "of sample" in s["ended"] and "is gone" in s["ended"] and s["step"] == 2
    assert seen[0]["ended"] == seen[1]["ended"] and seen[0]["digest"] == seen[1]["digest"]
    tries = [[ahead for number, *_, ahead in s["fetched"] if number == 3] for s in seen]
    assert set(tries[0]) == {True} and set(tries[1]) == {True, False}  # rank 1 tried once more, in the step
    assert run.query("SELECT count(*) FROM steps") == [(2,)] and run.query("SELECT step FROM claims") == [(3,)]


def test_both_ranks_go_on_with_the_next_broker(run, tmp_path):
    """One that died after a claim was written, and before either rank heard of it."""
    seen = shares_of(run, tmp_path, steps=4, failpoint="broker.during_claim:3")
    assert [s["ended"] for s in seen] == ["max_steps reached"] * 2 and seen[0]["digest"] == seen[1]["digest"]
    assert len(run.brokers) == 2 and run.brokers[0].returncode == -signal.SIGKILL
    for step, keys in run.query("SELECT step, group_keys FROM steps"):
        parts = [{tuple(key) for number, *key, _ in s["fetched"] if number == step} for s in seen]
        assert parts[0].isdisjoint(parts[1]) and parts[0] | parts[1] == set(map(tuple, json.loads(keys)))
