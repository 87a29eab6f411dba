"""Figures of the running system: the quick start itself, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.figures import Figure, benchmark
from common.loading import load_config
from common.sockets import Dealer, Router
from common.wire import GENERATOR_OPS, Sample, decode, decode_sample, encode_sample

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "configs/quickstart.yaml"
FROM_STEP, TO_STEP = 10, 40


@benchmark
def running_system() -> Iterator[Figure]:
    """`make run` for some steps: CPU of its processes between two steps, from the ledger and /proc."""
    config = load_config([str(ROOT / QUICKSTART)], [])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        args = f"run.dir={run} run.max_steps={TO_STEP + 5} run.goal_score=null trainer.test_freq=-1"
        began = time.time()
        with open(Path(folder) / "out", "w") as out:
            make = subprocess.Popen(
                ["make", "-s", "run", f"ARGS={args}"], cwd=ROOT, stdout=out, stderr=out, start_new_session=True
            )
            try:
                yield Figure("system.seconds_to_first_step", wait_for(run, 1, make)["time"] - began, "s")
                wait_for(run, FROM_STEP, make)
                before = snapshot(make.pid, run)
                wait_for(run, TO_STEP, make)
                after = snapshot(make.pid, run)
                make.wait(120)
            finally:
                if make.poll() is None:
                    os.killpg(make.pid, signal.SIGTERM)
                    make.wait()
        spent = {name: after[name] - before[name] for name in after}
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        pauses = [row["weights/pause_s"] for row in rows if row.get("weights/pause_s")]
        bare = bare_vllm(run / "hf", config.rollout.max_num_seqs)
    yield Figure("system.overlap_ratio", statistics.mean(overlaps(rows)), "share", "≥ 0.5")
    yield Figure("system.pause_per_swap", 1000 * statistics.median(pauses), "ms (median)")
    yield Figure("system.response_tokens_per_s", spent["tokens"] / spent["wall_s"], "tokens/s")
    in_system = spent["tokens"] / spent["generators_s"]
    yield Figure("system.tokens_per_cpu_s", in_system, "tokens per CPU second")
    yield Figure("system.tokens_per_cpu_s_of_bare_vllm", in_system / bare, "ratio", "≥ 0.8")
    wire_s = wire_seconds_per_sample() * config.data.train_batch_size * config.rollout.n
    step_s = spent["all_s"] / (TO_STEP - FROM_STEP)
    yield Figure("system.wire_share_of_step", 100 * wire_s / step_s, "% of the step's CPU", "≤ 1")


def wait_for(run: Path, step: int, make: subprocess.Popen[Any], within_s: float = 300) -> dict[str, Any]:
    """The metrics line of ``step``, once it is there."""
    end, path = time.monotonic() + within_s, run / "metrics.jsonl"
    while time.monotonic() < end:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for row in (json.loads(line) for line in lines if line.endswith("\n")):
            if row.get("training/global_step", 0) >= step:
                return dict(row)
        if make.poll() is not None:
            raise RuntimeError(f"the run ended before step {step}")
        time.sleep(0.1)
    raise RuntimeError(f"step {step} was not reached within {within_s} s")


def overlaps(rows: list[dict[str, Any]]) -> list[float]:
    return [row["generator/overlap_ratio"] for row in rows if "generator/overlap_ratio" in row]


def snapshot(pid: int, run: Path) -> dict[str, float]:
    """CPU seconds so far of all processes below ``pid`` and of the generators among them; committed tokens."""
    everyone = psutil.Process(pid).children(recursive=True)
    loops = [p for p in everyone if "generators.loop" in p.cmdline()]
    generators = [q for p in loops for q in (p, *p.children(recursive=True))]
    with sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        [(tokens,)] = ledger.execute("SELECT sum(num_tokens) FROM samples").fetchall()
    return {
        "wall_s": time.monotonic(), "all_s": cpu_seconds(everyone), "generators_s": cpu_seconds(generators),
        "tokens": tokens,
    }  # fmt: skip


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


def bare_vllm(model: Path, max_num_seqs: int) -> float:
    """Tokens per CPU second of AsyncLLM alone, on the same requests."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bare_vllm", str(model), str(max_num_seqs), "20"],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=True,
    )  # fmt: skip
    measured = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return float(measured["tokens"] / measured["cpu_s"])


def wire_seconds_per_sample(num: int = 2000) -> float:
    """CPU seconds to encode, send, receive and decode one of the toy's samples over loopback."""
    sample = Sample(
        group=1, attempt=0, index=0, prompt_ids=np.arange(14, dtype=np.int32),
        response_ids=np.arange(6, dtype=np.int32), behavior_logprobs=-np.ones(6, dtype=np.float32),
        spans=((1, 0, 6),), sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1}, finish_reason="stop",
        reward=1.0, generator="generator-0", timing={"generate_s": 0.1},
    )  # fmt: skip
    router = Router()
    dealer = Dealer(router.address, b"bench")
    began = time.process_time()
    for _ in range(num):
        dealer.send(encode_sample(sample))
    for _ in range(num):
        received = router.receive(10.0)
        assert received is not None
        _, header, [payload] = decode(received[1], GENERATOR_OPS)
        decode_sample(header, payload)
    spent = time.process_time() - began
    dealer.close()
    router.close()
    return spent / num
