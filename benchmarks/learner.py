"""The learner: how rows are laid out, on the lengths that real rollouts have; memory of log-probs; ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, benchmark
from common.wire import Sample

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, MEAN, CAP, PROMPT = 512, 200, 1024, 16
BUDGET = 16384  # tokens of one forward


@benchmark
def packing() -> Iterator[Figure]:
    """512 samples of lognormal lengths (mean 200, at most 1,024), prompts not shared: tokens that a forward
    processes per token that there is, and the busiest rank's work over the mean rank's."""
    from learner.batch import make_batch
    from learner.packing import Packing, micro_batches, shares

    batch, rows = make_batch(samples(SAMPLES)), np.arange(SAMPLES)
    packed = Packing(BUDGET, share_prompts=False)
    layouts = {
        "packed": (packed, "≤ 1.03"),
        "padded": (Packing(BUDGET, packed=False), None),
        "padded_in_order": (Packing(None, rows_per_forward=8, packed=False), None),
    }
    useful = batch.num_tokens - SAMPLES  # a sequence's last token is only a target
    for name, (how, aim) in layouts.items():
        processed = sum(micro.input_ids.numel() for micro in micro_batches(batch, rows, how))
        yield Figure(f"learner.processed_per_useful_token.{name}", float(processed / useful), "ratio", aim)
    for ranks in (2, 8):
        loads = [part.lengths.sum() for part in shares(batch, rows, packed, ranks)]
        yield Figure(f"learner.rank_imbalance.{ranks}", float(max(loads) / np.mean(loads)), "busiest/mean", "≤ 1.01")


@benchmark
def logprobs() -> Iterator[Figure]:
    """Log-probs of 2,048 tokens over a vocabulary of 150,000, float32: chunked against `log_softmax` of all
    logits, each in a process of its own; peaks of resident memory and CPU time."""
    naive, chunked = (_run("benchmarks.logprob_program", kind)[0] for kind in ("naive", "chunked"))
    if abs(naive["value"] - chunked["value"]) > 1e-5 * abs(naive["value"]):
        raise RuntimeError(f"chunked log-probs sum to {chunked['value']}, all at once to {naive['value']}")
    for name, key, aim in (
        ("memory.forward", "forward", "≤ 0.15"), ("memory.with_backward", "both", "≤ 0.25"),
        ("forward_cpu_time", "forward_s", "≤ 1.15"),
    ):  # fmt: skip
        yield Figure(f"learner.chunked_logprobs.{name}", chunked[key] / naive[key], "of all at once", aim)


@benchmark
def training() -> Iterator[Figure]:
    """A model of 0.3 M parameters, 48 samples of at most 512 tokens: forward and backward with packed and with padded
    rows, one thread; and a whole step (log-probs, update) on one rank and on two, one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        one = _run("benchmarks.rank_program", folder)[0]
        two = _run("benchmarks.rank_program", folder, ranks=2)[0]
    for name in ("packed", "padded", "padded_in_order"):
        yield Figure(f"learner.training_tokens_per_s.{name}", one[name], "useful tokens/s")
    yield Figure("learner.packed_speedup", one["packed"] / one["padded_in_order"], "× padded in order")
    yield Figure("learner.step_s.1", one["step_s"], "s")
    yield Figure("learner.step_s.2", two["step_s"] / one["step_s"], "of the step on one rank")


def write_model(folder: Path) -> None:
    """The quick start's model, random."""
    from common.loading import load_config
    from learner.export import save_weights
    from learner.initial import random_toy
    from learner.toy import write_toy_folder

    write_toy_folder(folder)
    save_weights(folder, random_toy(load_config([], ["model.toy=true", "data.task=reverse_digits"])))


def _run(module: str, *args: str, ranks: int = 1, within_s: float = 180) -> list[Any]:
    """What each rank of a program prints as JSON (nothing: left out)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args], cwd=ROOT, env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=within_s)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    if any(p.returncode for p in processes):
        raise RuntimeError(f"{module}: exit codes {[p.returncode for p in processes]}")
    return [json.loads(text) for text in outputs if text.strip()]


def samples(number: int, *, prompts: int | None = None, cap: int = CAP) -> list[Sample]:
    """Responses of lognormal lengths, each to a prompt of its own, or to one of `prompts`."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN) - 0.32, 0.8, number), 8, cap).astype(int)
    per_prompt = number // (prompts or number)
    return [
        Sample(
            group=i // per_prompt, attempt=0, index=i % per_prompt,
            prompt_ids=np.full(PROMPT, 3 + i // per_prompt % 32, dtype=np.int32),
            response_ids=rng.integers(3, 64, n).astype(np.int32), behavior_logprobs=np.full(n, -1, dtype=np.float32),
            spans=((0, 0, int(n)),), sampling={"temperature": 1.0}, finish_reason="stop", reward=float(i % 3 == 0),
            generator="",
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
