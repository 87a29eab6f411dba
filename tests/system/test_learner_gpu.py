"""The learner's checks on a GPU, as one script; without one the same code on the CPU with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "learner_gpu.py"


def _figures(folder: Path, *options: str, within_s: float) -> dict[str, float]:
    command = [sys.executable, str(SCRIPT), "--json", str(folder / "figures.json"), *options]
    done = subprocess.run(command, timeout=within_s, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "figures.json").read_text())["figures"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the script runs on the GPU")
def test_the_gpu_script_runs_on_a_cpu_and_its_comparisons_compare(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "--dry", within_s=280)
    assert 0 < figures["logprobs.packed_to_padded_in_order"] <= 0.05
    assert figures["training_tokens_per_s.padded"] > 0
    assert figures["step_s.offload_policy"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_script_says_that_there_is_no_gpu() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, "no GPU here; --dry runs the same code on the CPU")


@pytest.mark.gpu
@pytest.mark.timeout(420)
def test_the_learner_on_a_gpu(tmp_path: Path) -> None:
    figures = _figures(tmp_path, within_s=360)
    assert figures["logprobs.memory"] <= 0.25
    assert figures["training_tokens_per_s.packed_varlen"] > figures["training_tokens_per_s.padded_in_order"]
