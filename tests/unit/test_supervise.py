"""Supervision of real (small) processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from common.errors import ConfigError, FencedError, LedgerError, NoSignalError, RolledBackError, TrainingError
from common.processes import child_environment, descendants, spawn
from common.supervise import Child, End, Supervisor, last_words, verdict

OWN = End(1, "model.path=/x: cannot be loaded", 1, killed=False)
KILLED = End(-9, None, 1, killed=True)


NOTHING_TO_MEND = (ConfigError, NoSignalError, TrainingError, FencedError)


def ended_by(error):
    return End(error.exit_code, str(error), error.exit_code, killed=False)


def child(**fields):
    return Child("learner", start=lambda env, out: None, **fields)


@pytest.mark.parametrize(
    ("fields", "end", "expected"),
    [
        ({"ready": True}, KILLED, "restart"),
        ({"ready": False}, KILLED, "restart"),
        ({"ready": True}, OWN, "restart"),
        ({"ready": False}, OWN, "give up"),
        ({"ready": False, "restarts": 1, "last_error": "killed by a signal"}, OWN, "restart"),
        ({"ready": False, "restarts": 2, "last_error": str(OWN)}, OWN, "give up"),
        ({"ready": True, "restarts": 3}, KILLED, "give up"),
        ({"ready": True}, ended_by(LedgerError("busy")), "restart"),
        ({"ready": True, "restarts": 3}, ended_by(RolledBackError("back")), "restart"),
        *[({"ready": True}, ended_by(error("…")), "give up") for error in NOTHING_TO_MEND],
    ],
)
def test_who_is_started_again(fields, end, expected):
    assert verdict(child(**fields), end, max_restarts=3) == expected


def script(code):
    def start(env, out):
        return spawn([sys.executable, "-c", code], env=env, stdout=out, stderr=out)

    return start


def watch(supervisor, *, until, within_s=15.0):
    """Watch until ``until()``, or until an end that is no restart."""
    end = time.monotonic() + within_s

    def tick():
        assert time.monotonic() < end, "did not come true in time"
        return not until()

    return supervisor.watch(tick, finishes=lambda child, end: end.returncode == 0)


@pytest.fixture
def supervisor(tmp_path):
    made = Supervisor(tmp_path, max_restarts=3)
    yield made
    made.kill_all()


def test_a_killed_child_is_started_again_without_failpoints(supervisor, monkeypatch):
    monkeypatch.setenv("LEEWAY_FAILPOINT", "here")
    sleeper = supervisor.add(
        "learner", script("import os, time; print(os.environ.get('LEEWAY_FAILPOINT'), flush=True); time.sleep(60)")
    )
    first = sleeper.process
    watch(supervisor, until=lambda: "here" in supervisor.last_lines(sleeper, 5))
    os.kill(first.pid, signal.SIGKILL)
    outcome = watch(supervisor, until=lambda: sleeper.restarts == 1 and "None" in supervisor.last_lines(sleeper, 5))
    assert (outcome.child, sleeper.alive) == (None, True) and sleeper.process is not first


def test_a_child_that_cannot_start_ends_the_watch_with_its_own_words(supervisor):
    code = """
import json, os, sys
with open(os.environ["LEEWAY_ERROR_FILE"], "w") as f:
    json.dump({"error": "no such model", "exit_code": 1}, f)
sys.exit(1)
"""
    supervisor.add("learner", script(code))
    outcome = watch(supervisor, until=lambda: False)
    assert (outcome.child, outcome.gave_up, str(outcome.end)) == ("learner", True, "no such model")


def test_a_child_without_own_words_is_quoted(supervisor):
    supervisor.add("generators", script("raise ImportError('no vllm here')"))
    outcome = watch(supervisor, until=lambda: False)
    assert outcome.gave_up and str(outcome.end) == "ImportError: no vllm here"


def test_a_good_end_is_told(supervisor):
    supervisor.add("learner", script("pass"))
    outcome = watch(supervisor, until=lambda: False)
    assert (outcome.child, outcome.gave_up) == ("learner", False)


def test_dying_too_often_is_the_end(supervisor):
    dying = supervisor.add("broker", script("import os; os.kill(os.getpid(), 9)"))
    outcome = watch(supervisor, until=lambda: False)
    assert outcome.gave_up and dying.restarts == 3


def test_waiting_for_the_end_has_a_deadline(supervisor):
    supervisor.add(
        "learner",
        script("import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"),
    )
    watch(supervisor, until=lambda: "1" in supervisor.last_lines(supervisor.children["learner"], 5))
    supervisor.signal(signal.SIGTERM, "learner")
    start = time.monotonic()
    assert not supervisor.wait_for_end(["learner"], start + 0.5, lambda: True)
    assert 0.4 < time.monotonic() - start < 2
    supervisor.kill_all()
    assert supervisor.wait_for_end(["learner"], time.monotonic() + 5, lambda: True)


def test_last_words_are_the_workers_not_the_agents():
    output = """Traceback (most recent call last):
  File "learner/loop.py", line 3
ValueError: the real reason
E1130 12:00 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: learner FAILED
"""
    assert last_words(output) == "ValueError: the real reason"
    assert last_words("") == "it said nothing"


def test_children_die_with_their_parent_even_if_it_is_killed():
    """Grandchildren too, each bound to its own parent."""
    code = """
import sys, time
from common.processes import spawn
inner = "from common.processes import spawn; p = spawn(['sleep', '60']); print(p.pid, flush=True); p.wait()"
p = spawn([sys.executable, '-c', inner])
print(p.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=child_environment())
    below = [int(parent.stdout.readline()) for _ in range(2)]
    assert set(descendants(parent.pid)) == set(below)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in below):
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_environment_of_children(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = child_environment({"A": "b"})
    assert (env["OMP_NUM_THREADS"], env["A"], env["LEEWAY_PDEATHSIG"]) == ("7", "b", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in env
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert child_environment()["OMP_NUM_THREADS"] == "1"
