"""How a role starts and ends, in this process."""

import json
import logging
import signal
import subprocess
import sys
import threading

import pytest

from common import roles
from common.control import Control, start_server
from common.errors import LeewayError, Stopped
from common.loading import load_config
from common.roles import run_role, store_config

GIVEN = ["model.toy=true", "data.task=reverse_digits"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    url, process = start_server(tmp_path_factory.mktemp("redis"))
    yield url
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def _this_process_as_before(monkeypatch, tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEEWAY_REDIS_URL", raising=False)
    monkeypatch.setenv("LEEWAY_ERROR_FILE", str(tmp_path / "error"))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    log = logging.getLogger("leeway")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


@pytest.fixture
def start(server, request):
    """Run a role's main in this thread: ``(exit code, the role)``."""

    def one(main, *arguments, role="broker"):
        seen = []

        def body(r):
            seen.append(r)
            return main(r)

        code = run_role(body, role, ["--redis-url", server, "--run-id", request.node.name, *arguments])
        return code, seen[0] if seen else None

    return one


def fail(error):
    def main(role):
        raise error

    return main


def test_the_role_has_what_it_needs(start, tmp_path):
    code, role = start(lambda r: r.log.info("one\ntwo"), *GIVEN, "rollout.n=3")
    assert (code, role.name, role.config.rollout.n) == (0, "broker", 3)
    assert role.run_dir == tmp_path / "runs" / role.control.run_id and role.config.run.id == role.control.run_id
    assert (role.run_dir / "logs" / "broker.log").read_text().endswith(" broker INFO one | two\n")


def test_an_own_error_is_the_last_line_and_goes_to_the_supervisor(start, capsys, tmp_path):
    code, role = start(fail(LeewayError("no such model; give another")), *GIVEN)
    assert code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "broker: error: no such model; give another"
    assert json.loads((tmp_path / "error").read_text()) == {
        "name": "broker", "exit_code": 1, "error": "no such model; give another",
    }  # fmt: skip
    assert "broker ERROR no such model" in (role.run_dir / "logs" / "broker.log").read_text()


def test_an_unexpected_error_has_its_traceback_before_it(start, capsys):
    code, role = start(fail(ValueError("seven")), *GIVEN)
    lines = capsys.readouterr().err.splitlines()
    assert code == 1 and lines[-1] == "broker: error: ValueError: seven" and "Traceback" in "".join(lines[:-1])
    assert "Traceback" in (role.run_dir / "logs" / "broker.log").read_text()


def test_being_told_to_stop_is_no_error(start):
    assert start(fail(Stopped("a batch")), *GIVEN)[0] == 0


def test_sigterm_and_the_desired_state_set_the_stop_event(start):
    def on_signal(role):
        signal.raise_signal(signal.SIGTERM)
        assert role.stop.wait(5)

    def on_desired(role):
        role.control.register("generator", role.name)
        role.control.set_desired("stopped", "a test")
        assert role.stop.wait(5)

    assert start(on_signal, *GIVEN)[0] == 0
    assert start(on_desired, *GIVEN, role="generator")[0] == 0


def test_a_stopped_run_is_started_again_by_its_first_role(start):
    start(lambda r: r.control.set_desired("stopped", "a test"), *GIVEN)
    code, role = start(lambda r: r.control.register("broker", "broker"), *GIVEN)
    assert (code, role.control.desired()) == (0, "running")


def test_the_broker_stays_while_the_learner_ends(start, server):
    def main(role):
        learner = Control(server, role.control.run_id)
        learner.register("learner", "learner")
        role.control.set_desired("stopped", "a test")
        role.control.refresh()
        assert not role.stop.wait(0.3)
        learner.close()
        assert role.stop.wait(5)

    assert start(main, *GIVEN)[0] == 0


def test_without_a_config_a_role_takes_the_runs(start, server, request):
    control = Control(server, request.node.name)
    given = load_config([], [*GIVEN, f"run.id={request.node.name}", "rollout.n=6", "reward.custom_function.path=/r.py"])
    threading.Timer(0.3, store_config, (control, given)).start()
    code, role = start(lambda r: None)
    assert (code, role.config.rollout.n, role.config.reward.custom_function.path) == (0, 6, None)
    code, role = start(lambda r: None, "reward.custom_function.path=/mine.py", role="generator")
    assert (code, role.config.reward.custom_function.path) == (0, "/mine.py")
    control.close()


def test_a_reward_file_is_never_taken_from_redis(start, server, request, capsys):
    control = Control(server, request.node.name)
    store_config(control, load_config([], [*GIVEN, f"run.id={request.node.name}", "reward.custom_function.path=/r.py"]))
    code, _ = start(lambda r: None, role="generator")
    assert code == 2 and "give reward.custom_function.path=FILE on this host's command line" in capsys.readouterr().err
    control.close()


def test_another_config_is_refused_with_the_differences(start, capsys):
    assert start(lambda r: None, *GIVEN)[0] == 0
    assert start(lambda r: None, *GIVEN, "run.seed=4")[0] == 2
    assert capsys.readouterr().err.splitlines()[-1] == "  run.seed: 4 != 0"


def test_redis_that_is_not_there_is_named(capsys, monkeypatch):
    monkeypatch.setattr(roles, "CONNECT_S", 0.3)
    code = run_role(lambda r: None, "broker", ["--redis-url", "redis://:pw@127.0.0.1:1", "--run-id", "x", *GIVEN])
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 1 and last.startswith("broker: error: Redis at redis://127.0.0.1:1 cannot be reached within 0.3 s")
    assert "pw" not in last


def test_where_the_run_is_must_be_said(capsys):
    assert run_role(lambda r: None, "broker", []) == 2
    error = capsys.readouterr().err
    assert "--redis-url: give the Redis of the run" in error and "--run-id: give the id of the run" in error


def test_the_end_of_a_process_flushes_and_takes_no_interpreter_apart(tmp_path):
    """What would run at a usual exit does not; what was written is there."""
    code = f"""
import atexit, logging, pathlib, sys
from common import logs
from common.roles import end_process
log = logs.set_up("learner", pathlib.Path({str(tmp_path)!r}))
atexit.register(lambda: print("apart"))
log.info("last words")
sys.stdout.write("unflushed")
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "unflushed")
    assert "last words" in done.stderr and "last words" in (tmp_path / "learner.log").read_text()
