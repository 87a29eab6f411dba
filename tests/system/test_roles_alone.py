"""Roles started by hand, in any order, with the config given to one of them; the real broker."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.control import start_server

ROOT = Path(__file__).resolve().parents[2]
BASE = ["model.toy=true", "data.task=reverse_digits", "generators.count=0", "trainer.logger=[]"]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    url, process = start_server(tmp_path_factory.mktemp("redis"))
    yield url
    process.kill()
    process.wait()


@pytest.fixture
def role(redis_url, request, tmp_path):
    started = []

    def start(verb, *arguments):
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), verb, "--run-id", request.node.name, *arguments],
            env={**os.environ, "LEEWAY_REDIS_URL": redis_url}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def status(redis_url, request):
    def ask():
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), "status", "--json", "--redis-url", redis_url, "--run-id",
             request.node.name], capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return json.loads(done.stdout)

    return ask


def until(condition, within_s=30.0):
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.05)
    return value


def config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rollout: {n: 4}\n")
    return str(path)


def test_the_broker_waits_for_a_config_that_another_role_brings(role, status, tmp_path):
    broker = role("broker")
    assert status()["processes"] == []
    generators = role("generators", config_file(tmp_path), *BASE)
    entry = until(lambda: next(iter(status()["processes"]), None))
    assert (entry["role"], entry["pid"]) == ("broker", broker.pid)  # the command has become the role
    found = status()
    assert found["desired"] == "running" and "trouble" not in found
    assert sum(found["broker"]["states"].values()) >= 0

    other = role("generators", config_file(tmp_path), *BASE, "rollout.n=5")
    _, errors = other.communicate(timeout=30)
    assert other.returncode == 2 and errors.splitlines()[-1].strip() == "rollout.n: 5 != 4"

    for process in (generators, broker):
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert until(lambda: not status()["processes"])


def test_a_bad_config_of_one_role_is_told_at_once(role, tmp_path):
    before = cpu_seconds()
    bad = role("learner", config_file(tmp_path), *BASE, "rollout.temprature=1")
    _, errors = bad.communicate(timeout=30)
    assert bad.returncode == 2 and cpu_seconds() - before < 2
    assert (
        errors == "launch.py: error: command line: rollout.temprature: unknown key; did you mean rollout.temperature?\n"
    )


def cpu_seconds():
    """Of ended children: as the wall clock shows on a quiet machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_learner_alone_has_its_own_error_last(role, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    start = time.monotonic()
    learner = role("learner", *BASE, "model.toy=false", f"model.path={tmp_path}")
    _, errors = learner.communicate(timeout=90)
    assert learner.returncode != 0 and time.monotonic() - start < 60
    assert errors.splitlines()[-1].startswith("learner: error: ")
