"""Run control against a real server."""

import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from common.control import Control, start_server
from common.errors import ConfigError, ControlError, DeadlineError, Stopped
from common.loading import load_config
from common.roles import read_config, store_config


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    url, process = start_server(tmp_path_factory.mktemp("run"))
    yield url
    process.kill()
    process.wait()


@pytest.fixture
def run_id(request):
    return request.node.name


@pytest.fixture
def join(server, run_id):
    """Another process's side of run control (here: another object)."""
    made = []

    def one(url=server):
        made.append(Control(url, run_id))
        return made[-1]

    yield one
    for control in made:
        control.close()


def until(condition, within_s=8.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def test_an_entry_is_seen_by_others_and_follows_updates(join):
    broker, other = join(), join()
    broker.register("broker", "broker", state="starts")
    with pytest.raises(DeadlineError, match=r"the broker of run .*redis://127.0.0.1"):
        other.wait_for("broker", deadline_s=0.3)  # registered, but without an address
    broker.update(address="tcp://127.0.0.1:5", state="serves", version=7, load=3)
    entry = other.wait_for("broker", deadline_s=5)
    assert (entry.address, entry.state, entry.version, entry.pid) == ("tcp://127.0.0.1:5", "serves", 7, os.getpid())
    assert entry.fields["load"] == "3"
    assert [e.name for e in other.entries("learner")] == []
    broker.unregister()
    until(lambda: other.entries() == [])


def test_an_entry_expires_when_its_process_is_gone(join, monkeypatch):
    monkeypatch.setattr("common.control.TTL_S", 1)
    other, dead = join(), join()
    dead.register("generator", "generator-1")
    until(lambda: other.entry("generator-1"))
    dead._closing = True  # its thread ends: nobody refreshes the entry any more
    dead._work.set()
    until(lambda: other.entry("generator-1") is None)
    assert other.entries() == []


def test_leaving_spares_the_entry_of_a_successor(join):
    old, new = join(), join()
    old.register("learner", "learner", state="old")
    old._closing = True
    old._work.set()
    old._thread.join()
    new.register("learner", "learner", state="new")
    old.unregister()
    new.refresh()
    assert [e.state for e in new.entries("learner")] == ["new"]


def test_waits_end_when_told_to_stop(join):
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(Stopped, match="model folder"):
        join().wait_for_model(30, stop)


def test_a_learner_that_warms_up_may_take_longer_than_the_deadline_and_one_that_is_gone_may_not(join):
    learner, generator = join(), join()
    learner.register("learner", "learner")
    until(lambda: generator.entries("learner"))
    with pytest.raises(DeadlineError, match="the model folder of run"):
        generator.wait_for_model(0.2)  # without a warm-up
    found = []
    waits = threading.Thread(target=lambda: found.append(generator.wait_for_model(0.3, after_warmup=True)))
    waits.start()
    waits.join(1.2)
    assert waits.is_alive()
    learner.publish_model("/run/base", "9f86")
    waits.join(10)
    assert found == ["/run/base"]


def test_the_deadline_begins_when_the_learner_that_warmed_up_is_gone(join):
    learner, generator = join(), join()
    learner.register("learner", "learner")
    until(lambda: generator.entries("learner"))
    threading.Timer(0.5, learner.unregister).start()
    with pytest.raises(DeadlineError, match="the model folder of run"):
        generator.wait_for_model(0.3, after_warmup=True)
    assert generator.entries("learner") == []


def test_model_desired_state_limits_and_events(join):
    a, b = join(), join()
    assert (a.desired(), a.limit("staleness.max"), a.model()) == ("running", None, None)
    a.publish_model("/run/model", "9f86")
    a.set_desired("paused", "alice")
    a.set_limit("staleness.max", 3, "alice")
    assert b.wait_for_model(5) == "/run/model"
    b.refresh()
    assert (b.desired(), b.limit("staleness.max")) == ("paused", 3)
    assert [(who, what) for _, who, what in b.events()] == [
        ("alice", "desired state: paused"), ("alice", "staleness.max = 3"),
    ]  # fmt: skip
    with pytest.raises(ControlError, match="use one of running, paused"):
        a.set_desired("sleeping", "alice")


def test_first_config_wins_and_another_is_refused_with_the_differences(join):
    base = ["model.toy=true", "data.task=reverse_digits", "run.id=x", "run.dir=/tmp/x"]
    config = load_config([], [*base, "reward.custom_function.path=mine.py"])
    a, b = join(), join()
    store_config(a, config)
    store_config(b, config)
    with pytest.raises(ConfigError) as e:
        store_config(b, load_config([], [*base, "staleness.max=1", "run.seed=5"]))
    assert e.value.faults[1:] == ["run.seed: 5 != 0", "staleness.max: 1 != 2"]
    stored, needs_reward_file = read_config(b.wait_for_config(deadline_s=5))
    assert needs_reward_file and stored.reward.custom_function.path is None  # never a file to run


def test_connecting_names_the_address_and_not_the_password():
    with pytest.raises(ControlError, match=r"redis://127\.0\.0\.1:1 cannot be reached within 0\.2 s") as e:
        Control("redis://:secret@127.0.0.1:1", "x", deadline_s=0.2)
    assert "secret" not in str(e.value)
    with pytest.raises(ControlError, match="not a Redis URL"):
        Control("http://127.0.0.1:1", "x")


def test_a_wrong_password_is_told_at_once(server):
    start = time.monotonic()
    with pytest.raises(ControlError, match="refused this process"):
        Control(server.replace("//:", "//:x"), "x", deadline_s=30)
    assert time.monotonic() - start < 3


def test_redis_lost_and_back_empty(tmp_path):
    url, process = start_server(tmp_path)
    worker, watcher = Control(url, "r"), Control(url, "r")
    try:
        worker.register("learner", "learner", address="tcp://127.0.0.1:9")
        worker.store_config('{"a": 1}')
        worker.publish_model("/m", "9f86")
        worker.set_desired("paused", "bob")
        watcher.wait_for("learner", deadline_s=5)

        process.kill()
        process.wait()
        until(lambda: not worker.connected and not watcher.connected)
        assert watcher.entries("learner")[0].address == "tcp://127.0.0.1:9"
        assert (watcher.desired(), watcher.model()) == ("paused", "/m")
        with pytest.raises(ControlError, match=r"127\.0\.0\.1"):
            watcher.set_desired("running", "bob")

        shutil.rmtree(tmp_path / "redis" / "data")
        again, process = start_server(tmp_path, url=url)
        assert again == url
        until(lambda: worker.connected and watcher.connected)
        fresh = Control(url, "r")
        assert fresh.wait_for("learner", deadline_s=5).address == "tcp://127.0.0.1:9"
        assert fresh.wait_for_config(deadline_s=5) == '{"a": 1}'
        assert (fresh.wait_for_model(5), fresh.desired()) == ("/m", "paused")
        fresh.close()
    finally:
        worker.close()
        watcher.close()
        process.kill()
        process.wait()


def test_the_password_is_only_in_a_private_file(tmp_path):
    url, process = start_server(tmp_path)
    try:
        password = url.split(":")[2].split("@")[0]
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"server" in command and password.encode() not in command
        path = tmp_path / "redis" / "server.conf"
        assert password in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        process.kill()
        process.wait()
