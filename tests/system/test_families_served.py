"""Families after two steps of training: real vLLM, started from what a run leaves, samples with the same log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import resume
from learner.batch import make_batch
from learner.export import save_hf
from learner.models import load_models
from learner.packing import Packing, micro_batches
from learner.scoring import answers
from tests.families import FAMILIES, write_family
from tests.learner_parts import SimulatedFeed, alone, make_config, make_groups, make_learner, make_sample
from tests.live_run import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
USUAL = ["qwen3"]
LORA = ("model.lora_rank=4", "actor.optim.lr=1e-2")
CASES = [
    pytest.param(family, (), id=family, marks=() if family in USUAL else pytest.mark.soak) for family in FAMILIES
] + [pytest.param("llama", LORA, id="llama, merged adapters", marks=pytest.mark.soak)]


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None: ...


@pytest.mark.parametrize(("family", "options"), CASES)
def test_vllm_samples_with_the_learners_logprobs(family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", family, hidden_size=128, head_dim=32)  # smaller heads it has not
    config = make_config(*options)
    feed = SimulatedFeed(lambda step, version: make_groups(config, step, version=version))
    learner = make_learner(config, load_models(config, folder, alone()), feed, tmp_path / "run")
    resume.resume(learner, feed.attach())
    learner.step()
    learner.step()
    actor: Any = learner.models.actor.module
    save_hf(tmp_path / "hf", actor, NoTokenizer(), dtype="float32", ranks=alone())

    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 64, n).astype(np.int32) for n in (3, 5, 9, 14, 20, 31, 40, 4)]
    served = _sampled_by_vllm(tmp_path / "hf", [p.tolist() for p in prompts])
    samples = [
        make_sample(
            rng, i, 0, prompt_ids=prompt, response_tokens=len(ids), response_ids=np.array(ids, dtype=np.int32),
            behavior_logprobs=np.array(logprobs, dtype=np.float32),
        )
        for i, (prompt, (ids, logprobs)) in enumerate(zip(prompts, served, strict=True))
    ]  # fmt: skip
    batch = make_batch(samples)
    micros = micro_batches(batch, np.arange(len(batch)), Packing(128, share_prompts=actor.shares_prompts))
    with torch.no_grad():
        ours, _ = answers(actor, batch, micros, alone(), with_entropy=False)
    assert int(batch.mask.sum()) == 24 * len(prompts)
    difference = (ours - batch.behavior_logprobs)[batch.mask].abs()
    print(f"\n{family}: largest difference {difference.max():.1e}, spread of log-probs {ours[batch.mask].std():.2f}")
    assert difference.max() <= 1e-4
    assert ours[batch.mask].std() > 0.1, "far from flat"


def _sampled_by_vllm(folder: Path, prompts: list[list[int]]) -> list[list[Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_logprobs", str(folder)], input=json.dumps(prompts), cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
