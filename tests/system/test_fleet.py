"""The fleet with real processes; the generators in it have no engine."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from common.control import Control, Entry, start_server
from common.errors import LeewayError
from common.limits import size_key
from common.loading import load_config
from generators.fleet import Fleet

ROOT = Path(__file__).resolve().parents[2]
FLEET = [sys.executable, "-m", "tests.simulated_generator", "fleet"]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url, process = start_server(tmp_path_factory.mktemp("run"))
    yield url
    process.kill()
    process.wait()


class Fleets:
    """Starts fleets of one run and ends what is left of them."""

    def __init__(self, url: str, run_id: str, run_dir: str) -> None:
        self._arguments = [
            "--redis-url", url, "--run-id", run_id, "generators.count=2", "model.toy=true", "data.task=reverse_digits",
            f"run.dir={run_dir}", "run.max_restarts=2", "run.stop_timeout_s=10",
        ]  # fmt: skip
        self.control = Control(url, run_id)
        self._started: list[subprocess.Popen[str]] = []
        self._place = ["--redis-url", url, "--run-id", run_id]

    def verb(self, *args: str) -> int:
        return subprocess.run([sys.executable, str(ROOT / "launch.py"), *args, *self._place], timeout=60).returncode

    def start(self, behaviour: str = "works") -> subprocess.Popen[str]:
        env = {**os.environ, "SIMULATED": behaviour, "LEEWAY_PDEATHSIG": "1"}
        self._started.append(subprocess.Popen([*FLEET, *self._arguments], env=env, stderr=subprocess.PIPE, text=True))
        return self._started[-1]

    def generators(self, count: int) -> list[Entry]:
        """Wait until exactly so many generators have registered."""
        until(lambda: len(self.control.entries("generator")) == count)
        return sorted(self.control.entries("generator"), key=lambda e: e.name)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        self.control.close()


@pytest.fixture
def fleets(redis_url: str, tmp_path) -> Iterator[Fleets]:
    made = Fleets(redis_url, tmp_path.name, str(tmp_path))
    yield made
    made.end()


def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def processes_of(entries: list[Entry]) -> list[psutil.Process]:
    return [psutil.Process(pid) for e in entries for pid in (e.pid, int(e.fields["engine_pid"]))]


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    """Ended; who reaps an orphan, and when, is not ours to say."""

    def ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    end = time.monotonic() + within_s
    while not all(map(ended, processes)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_generators_have_names_of_their_own_in_every_fleet(fleets):
    first, second = fleets.start(), fleets.start()
    names = [e.name for e in fleets.generators(4)]
    assert len(set(names)) == 4
    for fleet in (first, second):
        assert sum(f"-{fleet.pid}-" in name for name in names) == 2


def test_a_killed_generator_is_started_again_under_its_name(fleets):
    fleets.start()
    before = fleets.generators(2)
    os.kill(before[0].pid, signal.SIGKILL)
    assert gone(processes_of(before[:1]), 5)  # with its engine
    until(lambda: (e := fleets.control.entry(before[0].name)) is not None and e.pid != before[0].pid)
    assert [e.name for e in fleets.generators(2)] == [e.name for e in before]
    assert fleets.generators(2)[1].pid == before[1].pid


def test_restarts_are_bounded(fleets):
    fleet = fleets.start()
    victim = fleets.generators(2)[0]
    for kill in range(3):
        pid = fleets.control.entry(victim.name).pid
        os.kill(pid, signal.SIGKILL)
        if kill < 2:  # run.max_restarts=2
            until(lambda p=pid: (e := fleets.control.entry(victim.name)) is not None and e.pid != p)
    assert any(f"{victim.name} is given up: killed by a signal" in line for line in fleet.stderr)
    assert fleet.poll() is None  # the other one works on


def test_a_stop_ends_all_of_it(fleets):
    fleet = fleets.start()
    processes = processes_of(fleets.generators(2))
    before = time.monotonic()
    fleet.send_signal(signal.SIGTERM)
    assert fleet.wait(10) == 0
    assert time.monotonic() - before < 8 and gone(processes, 1)
    fleets.generators(0)


def test_generators_die_with_a_killed_fleet(fleets):
    fleet = fleets.start()
    processes = processes_of(fleets.generators(2))
    fleet.kill()
    assert gone(processes, 5)


@pytest.mark.parametrize(
    ("behaviour", "exit_code", "error"),
    [
        ("cannot start", 1, "vLLM does not start: no such device"),
        ("bad config", 2, "reward.custom_function.path=x.py: no such file"),
    ],
)
def test_if_no_generator_can_start_the_last_words_are_theirs(fleets, behaviour, exit_code, error):
    fleet = fleets.start(behaviour)
    _, said = fleet.communicate(timeout=20)
    assert fleet.returncode == exit_code
    assert said.splitlines()[-1].endswith(f": error: {error}")


def test_one_generator_that_cannot_start_does_not_end_the_others(fleets):
    fleet = fleets.start("first cannot start")
    (other,) = fleets.generators(1)
    assert other.name.endswith("-1") and fleet.poll() is None
    fleet.send_signal(signal.SIGTERM)
    _, said = fleet.communicate(timeout=10)
    assert fleet.returncode == 0
    assert f"{other.name[:-1]}0 is given up: vLLM does not start" in said


def test_generators_that_end_by_themselves_end_the_fleet(fleets):
    assert fleets.start("ends by itself").wait(20) == 0


def test_a_fleet_grows_and_shrinks_and_a_drained_generator_is_not_replaced(fleets):
    fleet = fleets.start()
    before = [e.name for e in fleets.generators(2)]
    assert fleets.verb("scale", "4") == 0
    grown = [e.name for e in fleets.generators(4)]
    assert set(before) < set(grown)
    assert fleets.verb("scale", "2") == 0
    assert [e.name for e in fleets.generators(2)] == before  # the youngest go
    assert fleets.verb("drain", "--generator", before[0]) == 0
    until(lambda: [e.state for e in fleets.control.entries("fleet")] == ["1 of 2 generators"])
    assert [e.name for e in fleets.generators(1)] == before[1:]
    assert fleets.verb("drain", "--generator", before[0]) == 2  # it is gone
    assert fleets.verb("scale", "2") == 0  # the size it has by now, asked for again: somebody takes the place
    assert len({e.name for e in fleets.generators(2)} - set(grown)) == 1  # under a name that nobody had
    assert fleets.verb("scale", "0") == 0
    fleets.generators(0)
    assert fleet.poll() is None  # it waits to be asked for more
    assert fleets.verb("scale", "1") == 0
    fleets.generators(1)


def test_a_fleet_that_was_made_smaller_needs_room_for_no_more_when_it_starts_again(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")  # 2,000 bytes in bfloat16
    monkeypatch.setattr("common.preflight.free_bytes", lambda: 3_000)
    config = load_config([], ["data.task=reverse_digits", f"model.path={tmp_path}", "generators.count=8"])
    control = SimpleNamespace(register=lambda *args: None, update=lambda **fields: None)
    role = SimpleNamespace(
        config=config, control=control, name="fleet", run_dir=tmp_path, stop=threading.Event(), log=logging.getLogger()
    )
    role.stop.set()
    for asked, count in ((None, 8), ([2, 1.0], 2)):
        control.limit = lambda key, asked=asked: asked if key == size_key("fleet") else None
        with pytest.raises(LeewayError, match=f"generators.count={count}: with weights.staging=host"):
            Fleet(role, []).run()
    control.limit = lambda key: [0, 1.0] if key == size_key("fleet") else None
    assert Fleet(role, []).run() is None


def test_which_fleet_is_to_change_must_be_said_where_there_are_several(fleets):
    fleets.start()
    second = fleets.start()
    fleets.generators(4)
    assert fleets.verb("scale", "3") == 2
    name = next(e.name for e in fleets.control.entries("fleet") if e.pid == second.pid)
    assert fleets.verb("scale", "3", "--fleet", name) == 0
    assert sum(e.name.startswith(name) for e in fleets.generators(5)) == 3
