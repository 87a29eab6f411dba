"""A real run for system tests: processes started by the commands a user types, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from common.redis_server import start_server

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
T = TypeVar("T")


def until(condition: Callable[[], T], within_s: float, what: str) -> T:
    """The first true value of ``condition``; fails by name after ``within_s``."""
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.1)
    return value


class LiveRun:
    """One run in ``folder``: ``start`` any of its commands; ``close`` ends what is left."""

    def __init__(self, folder: Path, *, server: bool = False) -> None:
        self.folder = folder
        self.dir = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.started: list[subprocess.Popen[bytes]] = []
        self.may_fail: list[subprocess.Popen[bytes]] = []  # the test killed what they had started
        self.logs: dict[int, Path] = {}
        self.url, self._server = start_server(folder / "redis") if server else (None, None)

    def start(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        """``launch.py ARGS``; with a server of ours, its URL and the run id go with the command."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LEEWAY")}
        place = ["--redis-url", self.url, "--run-id", "live"] if self.url else []
        log = self.folder / f"{len(self.started)}-{args[0]}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch.py"), args[0], *place, *args[1:]],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**clean, "LEEWAY_STRICT": "1", "LEEWAY_PDEATHSIG": "1", **env},
            )  # fmt: skip
        self.started.append(process)
        self.logs[process.pid] = log
        return process

    def settings(self, *overrides: str) -> list[str]:
        return [QUICKSTART, f"run.dir={self.dir}", "run.id=live", "run.goal_score=null", *overrides]

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return self.logs[process.pid].read_text(errors="replace")

    # ------------------------------------------------------------ what happened so far
    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if "training/global_step" in row]

    def step(self) -> int:
        return max((int(row["training/global_step"]) for row in self.metrics()), default=0)

    def wait_for_step(self, step: int, within_s: float = 150) -> None:
        def reached() -> bool:
            watched = [p for p in self.started if p not in self.may_fail]
            dead = [p for p in watched if p.poll() not in (None, 0, -signal.SIGKILL)]
            assert not dead or self.step() >= step, self.log(dead[0])[-3000:]
            return self.step() >= step

        until(reached, within_s, f"step {step} (now {self.step()})")

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.dir / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
            return ledger.execute(sql).fetchall()

    def roles(self) -> set[str]:
        """Roles that are registered; none while there is no such run yet."""
        try:
            return {p["role"] for p in self.status()["processes"]}
        except AssertionError:
            return set()

    def status(self) -> dict[str, Any]:
        place = ["--redis-url", self.url, "--run-id", "live"] if self.url else [str(self.dir)]
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), "status", "--json", *place],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def process(self, role: str, name: str = "") -> psutil.Process:
        found = [p for p in self.status()["processes"] if p["role"] == role and name in p["name"]]
        return psutil.Process(found[0]["pid"])

    def below(self) -> list[psutil.Process]:
        """Everything the started commands have started."""
        alive = [psutil.Process(p.pid) for p in self.started if p.poll() is None]
        return alive + [child for p in alive for child in p.children(recursive=True)]

    def close(self) -> None:
        left = self.below()
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for orphan in psutil.wait_procs(left, timeout=5)[1]:
            orphan.kill()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


def assert_nothing_too_old_was_trained(run: LiveRun) -> None:
    """From the ledger's own rows: the versions that sampled each trained token against each step's limit."""
    [(tokens,)] = run.query("SELECT coalesce(sum(num_tokens), 0) FROM trained_tokens")
    assert tokens > 0
    outside = "trained_at - sampled_at > staleness_limit OR sampled_at > trained_at"
    assert run.query(f"SELECT * FROM trained_tokens WHERE {outside} LIMIT 3") == []
    twice = "SELECT grp FROM attempts WHERE state = 'trained' GROUP BY grp HAVING count(*) > 1"
    assert run.query(twice) == []
