"""The whole loop on real parts: vLLM, ZeroMQ, SQLite, Redis, FSDP2, weights over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.summary import Summary
from common.tasks import TASKS
from tests.live_run import ROOT, LiveRun, assert_nothing_too_old_was_trained

pytestmark = pytest.mark.engine
STEPS = 16


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """The quick start for some steps, seen to its end. Its engines are so small that the learner waits for them."""
    run = LiveRun(tmp_path_factory.mktemp("light"))
    launcher = run.start(
        "run", *run.settings(f"run.max_steps={STEPS}", "trainer.test_freq=8", "rollout.max_num_seqs=6")
    )
    try:
        run.wait_for_step(3)
        run.listening = {  # type: ignore[attr-defined]
            c.laddr.ip for p in run.below() for c in p.net_connections() if c.status == psutil.CONN_LISTEN
        }
        assert launcher.wait(270) == 0, run.log(launcher)[-3000:]
        yield run
    finally:
        run.close()


def test_no_token_older_than_the_limit_was_trained(light: LiveRun) -> None:
    assert_nothing_too_old_was_trained(light)
    assert light.query("SELECT max(step), count(*) FROM steps WHERE applied") == [(STEPS, STEPS)]


def test_it_is_asynchronous(light: LiveRun) -> None:
    rows = light.metrics()
    assert max(row["staleness/max"] for row in rows) > 0
    ratios = [row["generator/overlap_ratio"] for row in rows if "generator/overlap_ratio" in row]
    assert sum(ratios) / len(ratios) >= 0.5
    mixed = "SELECT count(*) FROM (SELECT 1 FROM trained_tokens GROUP BY grp, idx HAVING count(*) > 1)"
    assert light.query(mixed)[0][0] > 0


def test_learner_and_engines_agree(light: LiveRun) -> None:
    """Tokens sampled by exactly the step's version: the learner's log-probs are vLLM's."""
    rows = [row for row in light.metrics() if row["rollout_corr/num_same_version_tokens"] > 0]
    assert rows
    assert max(row["rollout_corr/logprob_diff_max"] for row in rows) <= 1e-4


def test_only_loopback_listened(light: LiveRun) -> None:
    assert light.listening == {"127.0.0.1"}  # type: ignore[attr-defined]


def test_its_files(light: LiveRun) -> None:
    summary = Summary.read(light.dir)
    assert summary.step == STEPS and summary.ended == "max_steps reached"
    assert [row["training/global_step"] for row in light.metrics()] == list(range(1, STEPS + 1))
    assert list((light.dir / "wandb").rglob("*.wandb"))
    assert (light.dir / "run.json").stat().st_mode & 0o777 == 0o600


def test_the_hugging_face_folder_scores_what_the_run_said(light: LiveRun) -> None:
    """Held-out prompts, greedy: by transformers, by vLLM in a process of its own, and by the run."""
    task = TASKS["reverse_digits"]
    prompts = [task.row("val", i, seed=0) for i in range(128)]
    texts = ["".join(m["content"] for m in row["prompt"]) for row in prompts]
    by_transformers = answers_of_transformers(light.dir / "hf", texts)
    by_vllm = json.loads(
        subprocess.run(
            [sys.executable, "-m", "tests.vllm_answers", str(light.dir / "hf")],
            input=json.dumps(texts), capture_output=True, text=True, timeout=150, cwd=ROOT, check=True,
        ).stdout.splitlines()[-1]
    )  # fmt: skip
    assert by_vllm == by_transformers
    score = sum(a == row["reward_model"]["ground_truth"] for a, row in zip(by_transformers, prompts, strict=True)) / 128
    assert light.query(f"SELECT num_scored, total / num_scored FROM validations WHERE step = {STEPS}") == [(128, score)]
    assert Summary.read(light.dir).val_score == score


def answers_of_transformers(folder: Path, texts: list[str]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])  # equally long
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    return tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
