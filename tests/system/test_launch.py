"""The launcher with real processes: ends, restarts, verbs, sockets.

The launcher, Redis, torch.distributed.run and all of ``common`` are the real ones; the three roles
are small stand-ins that start, register and end as the real ones do, so that a launch takes seconds.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLES = {
    "broker": """
import sys
from common import wire
from common.roles import run_role
from common.sockets import Router

def main(role):
    router = Router()
    role.control.register("broker", role.name, address=router.address, state="serves")
    while not role.stop.is_set():
        if message := router.receive(0.1):
            _, fields, _ = wire.decode(message[1], wire.LEARNER_OPS)
            status = {"states": {"ready": 3}, "pid": role.control.entry("broker").pid}
            router.send(message[0], wire.encode("status_is", id=fields["id"], status=status))

if __name__ == "__main__":
    sys.exit(run_role(main, "broker"))
""",
    "learner": """
import os, sys
from common.errors import LeewayError
from common.failpoints import failpoint
from common.metrics import MetricsWriter
from common.roles import run_role
from common.summary import Summary

def main(role):
    control = role.control
    if role.config.model.path:
        raise LeewayError("model.path=/nowhere: cannot be loaded")
    control.register("learner", role.name, address="tcp://127.0.0.1:1", state="warms up")
    control.wait_for("broker", deadline_s=30, stop=role.stop)
    control.publish_model("/model", "9f86")
    writer = MetricsWriter(role.run_dir, role.config)
    step = 1
    while step <= role.config.run.max_steps and not role.stop.wait(0.02):
        failpoint("learner.step")
        if control.desired() == "paused":
            continue
        control.update(state=f"step {step}", version=step)
        writer.write(step, {"critic/score/mean": step / 100, "training/global_step": step})
        step += 1
    ended = "stopped" if role.stop.is_set() else "max_steps reached"
    Summary(ended=ended, step=step - 1, score_first=0.01, score_last=step / 100).write(role.run_dir)
    writer.close()

if __name__ == "__main__":
    sys.exit(run_role(main, "learner"))
""",
    "generators": """
import sys
from common.processes import spawn
from common.roles import run_role

def main(role):
    engine = spawn(["sleep", "1000"])
    role.control.register("generator", role.name, state="waits for the model folder")
    role.control.wait_for_model(30, role.stop)
    role.control.update(version=0, state="samples")
    role.stop.wait()
    engine.terminate()
    engine.wait()

if __name__ == "__main__":
    sys.exit(run_role(main, "generator"))
""",
}
CONFIG = "model: {toy: true}\ndata: {task: reverse_digits}\ntrainer: {logger: [console]}\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the launcher and ``common`` beside the stand-ins."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "launch.py", folder)
    for name, source in ROLES.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "__main__.py").write_text(source)
    (folder / "toy.yaml").write_text(CONFIG)
    return folder


class Launch:
    """One ``launch.py run``."""

    def __init__(self, tree, folder, *overrides, **env):
        self.tree, self.folder = tree, folder
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LEEWAY")}
        self.process = subprocess.Popen(
            [sys.executable, str(tree / "launch.py"), "run", str(tree / "toy.yaml"), f"run.dir={folder}", "run.id=r",
             *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**clean, "LEEWAY_STRICT": "1", **env},
        )  # fmt: skip

    def steps(self):
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def below(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def output(self, within_s=30.0):
        return self.process.communicate(timeout=within_s)[0]

    def verb(self, *args):
        done = subprocess.run(
            [sys.executable, str(self.tree / "launch.py"), args[0], str(self.folder), *args[1:]],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def status(self):
        return json.loads(self.verb("status", "--json")[1])

    def pids(self):
        return {p["role"]: p["pid"] for p in self.status()["processes"]}


@pytest.fixture
def launch(tree, tmp_path):
    made = []

    def one(*overrides, **env):
        made.append(Launch(tree, tmp_path / "run", *overrides, **env))
        return made[-1]

    yield one
    for launched in made:
        if launched.process.poll() is None:
            below = launched.below()
            launched.process.kill()
            psutil.wait_procs(below, timeout=10)
        launched.process.communicate()


def until(condition, within_s=30.0):
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.05)
    return value


def assert_gone(processes, within_s):
    """An orphan that nobody has collected yet is gone too."""
    end = time.monotonic() + within_s
    while alive := [p for p in processes if status_of(p) not in (None, psutil.STATUS_ZOMBIE)]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


def status_of(process):
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def test_a_run_from_start_to_end_and_continued(launch):
    first = launch("run.max_steps=5")
    out = first.output()
    assert first.process.returncode == 0, out
    assert [line.split(" - ")[0] for line in out.splitlines() if line.startswith("step:")] == [
        f"step:{s}" for s in range(1, 6)
    ]
    assert "5 steps in 0 s, max_steps reached. Mean score 0.010 → 0.060" in out
    assert out.splitlines()[-1] == f"  metrics: {first.folder}/metrics.jsonl"
    assert stat.S_IMODE((first.folder / "run.json").stat().st_mode) == 0o600
    assert not (first.folder / "rendezvous").exists()
    assert "is not running" in first.verb("status")[1]

    again = launch("run.max_steps=8")
    out = again.output()
    assert again.process.returncode == 0 and "run r continues in" in out
    rows = [json.loads(line)["step"] for line in (again.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 9))
    refused = launch("run.max_steps=8", "actor.optim.lr=1")
    assert "actor.optim.lr: 1.0 != 1e-06" in refused.output() and refused.process.returncode == 2


def test_the_launcher_killed_takes_everything_with_it_and_nothing_listened_outside(launch):
    run = launch()
    until(lambda: run.steps() > 3)
    below = run.below()
    assert len(below) == 6  # Redis, broker, agent, learner, generators, its engine
    listening = {c.laddr.ip for p in below for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    password = json.loads((run.folder / "run.json").read_text())["redis_url"].split(":")[2].split("@")[0]
    assert len(password) > 20 and not any(password in " ".join(p.cmdline()) for p in below)
    run.process.kill()
    assert_gone(below, within_s=5)


def test_ctrl_c_ends_in_order_with_a_summary(launch):
    run = launch()
    until(lambda: run.steps() > 3)
    below, start = run.below(), time.monotonic()
    run.process.send_signal(signal.SIGINT)
    out = run.output(within_s=15)
    assert time.monotonic() - start < 15
    assert run.process.returncode == 130
    assert "stopped. Mean score" in out and "Traceback" not in out
    assert_gone(below, within_s=0.5)


def test_ctrl_c_before_the_roles_are_up(launch):
    run = launch()
    until(lambda: len(run.below()) >= 3)
    below = run.below()
    run.process.send_signal(signal.SIGINT)
    out = run.output(within_s=15)
    assert run.process.returncode == 130 and "Traceback" not in out
    assert_gone(below, within_s=0.5)


def test_a_second_ctrl_c_kills_at_once(launch):
    run = launch(LEEWAY_FAILPOINT="learner.step:4:stop")
    until(lambda: any(status_of(p) == psutil.STATUS_STOPPED for p in run.below()))
    below = run.below()
    run.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(1.0)  # the learner does not answer
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(5) == 130 and time.monotonic() - start < 2
    assert_gone(below, within_s=1)


def test_a_learner_that_does_not_end_is_killed_in_time(launch):
    run = launch("run.stop_timeout_s=4", LEEWAY_FAILPOINT="learner.step:4:stop")
    until(lambda: any(status_of(p) == psutil.STATUS_STOPPED for p in run.below()))
    below, start = run.below(), time.monotonic()
    run.process.send_signal(signal.SIGINT)
    out = run.output(within_s=15)
    assert time.monotonic() - start < 9
    assert "learner did not end in time and is killed" in out
    assert_gone(below, within_s=0.5)


def test_the_own_error_of_a_role_that_cannot_start_is_the_last_word(launch):
    start = time.monotonic()
    run = launch("model.toy=false", "model.path=some/name")
    out = run.output(within_s=60)
    assert run.process.returncode == 1 and time.monotonic() - start < 60
    assert out.splitlines()[-1] == "learner: error: model.path=/nowhere: cannot be loaded"
    assert "Traceback" not in out


def test_whoever_is_killed_is_started_again_and_the_verbs_work(launch):
    run = launch(LEEWAY_FAILPOINT="learner.step:4")  # the first learner kills itself
    until(lambda: run.steps() > 10)
    status = run.status()
    assert {(p["role"], p["host"] != "", p["pid"] > 0) for p in status["processes"]} == {
        (role, True, True) for role in ("broker", "learner", "generator")
    }
    assert (status["desired"], status["broker"]["states"]) == ("running", {"ready": 3})
    lines = run.verb("status")[1].splitlines()
    assert lines[0] == "run r: running" and "states: ready 3" in lines
    first = run.pids()
    redis = json.loads((run.folder / "run.json").read_text())["pids"]["redis"]
    for pid in (first["broker"], first["generator"], redis, first["learner"]):
        os.kill(pid, signal.SIGKILL)
    until(lambda: run.status()["processes"] and not set(run.pids().values()) & set(first.values()))
    until(lambda: set(run.pids()) == {"broker", "learner", "generator"})
    assert run.status()["broker"]["pid"] == run.pids()["broker"]
    restarts = [line for line in run.verb("why")[1].splitlines() if "started again" in line]
    assert any("launcher: learner: killed by a signal; started again (2 of 10)" in line for line in restarts)

    assert run.verb("pause") == (0, "run r: paused\n")
    until(lambda: run.status()["desired"] == "paused")
    time.sleep(1.5)  # the learner looks once a second
    paused_at = run.steps()
    time.sleep(0.5)
    assert run.steps() == paused_at
    assert run.verb("resume")[0] == 0
    assert run.verb("set", "staleness.max=4", "actor.optim.lr=1e-3") == (
        0, "run r: staleness.max = 4\nrun r: actor.optim.lr = 0.001\n"
    )  # fmt: skip
    assert any(": staleness.max = 4" in line for line in run.verb("why")[1].splitlines())
    assert run.verb("set", "staleness.max=-1")[0] == 2
    code, said = run.verb("set", "rollout.n=2")
    assert code == 2 and "rollout.n: cannot be changed while the run goes on" in said
    until(lambda: run.steps() > paused_at)

    refused = Launch(run.tree, run.folder, "run.max_steps=7")
    assert "a run is going on in it" in refused.output() and refused.process.returncode == 2

    below = run.below()
    assert run.verb("stop") == (0, "run r: stopped\n")
    out = run.output(within_s=15)
    assert run.process.returncode == 0 and "stopped. Mean score" in out
    assert_gone(below, within_s=0.5)
    assert run.verb("pause")[0] == 1
