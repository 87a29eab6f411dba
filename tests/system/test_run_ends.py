"""A real run, engines and all: what listens while it runs, and what Ctrl-C leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.summary import Summary

ROOT = Path(__file__).resolve().parents[2]


def steps(folder):
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    return max((json.loads(line)["step"] for line in path.read_text().splitlines()), default=0)


def running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.engine
def test_loopback_only_and_nothing_left_after_ctrl_c(tmp_path):
    folder, shared = tmp_path / "run", set(os.listdir("/dev/shm"))
    with open(tmp_path / "out", "w") as out:
        launcher = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), "run", str(ROOT / "configs" / "quickstart.yaml"),
             f"run.dir={folder}", "model.warmup.steps=5", "run.goal_score=null", "generators.count=1"],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, "LEEWAY_STRICT": "1"},
        )  # fmt: skip
    try:
        end = time.monotonic() + 150
        while steps(folder) < 2:
            assert launcher.poll() is None and time.monotonic() < end, (tmp_path / "out").read_text()[-3000:]
            time.sleep(0.2)
        below = psutil.Process(launcher.pid).children(recursive=True)
        listening = {c.laddr.ip for p in below for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        start = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(15) == 130 and time.monotonic() - start < 15
    finally:
        if launcher.poll() is None:
            launcher.kill()
    assert [p for p in below if running(p)] == []
    assert set(os.listdir("/dev/shm")) - shared == set()
    summary = Summary.read(folder)
    assert summary.ended == "stopped" and summary.step >= 2
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (folder / "hf").iterdir()}
    printed = (tmp_path / "out").read_text()
    assert summary.paragraph(folder) in printed and "Traceback" not in printed
