"""A pretrained model through every part: PPO with critic and reference, two vLLM generators, in bounded memory.

Needs `scripts/get_smollm2.py` to have been run (or LEEWAY_SMOLLM2 to name the folder it made).
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.live_run import ROOT, LiveRun, assert_nothing_too_old_was_trained

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(3000)]
MODEL = Path(os.environ.get("LEEWAY_SMOLLM2", ROOT / "models" / "smollm2"))
CONFIG = str(ROOT / "configs" / "smollm2.yaml")
LIMIT_BYTES = 14 << 30


class MemoryWatch:
    """The largest sum of proportional set sizes of a process and all below it, sampled twice a second."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = psutil.Process(process.pid)
        self.peak = 0
        self.parts: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            parts = {f"{p.pid} {_what(p)}": _pss(p.pid) for p in self._processes()}
            if sum(parts.values()) > self.peak:
                self.peak, self.parts = sum(parts.values()), parts

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:  # it has ended
            return []

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _what(p: psutil.Process) -> str:
    try:
        command = p.cmdline()
    except psutil.Error:
        return "?"
    modules = ("learner", "broker", "generators", "launch.py", "torch.distributed.run")
    return next((part for part in modules if part in command), (command or [p.name()])[0])


@pytest.mark.parametrize("options", [(), ("model.lora_rank=16", "actor.optim.lr=1e-4")], ids=["all weights", "LoRA"])
def test_three_asynchronous_ppo_steps_of_a_pretrained_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not (MODEL / "model.safetensors").exists():
        pytest.skip(f"{MODEL} is not there: run scripts/get_smollm2.py")
    run = LiveRun(tmp_path)
    files = [f"data.{split}_files=[{MODEL / split}.jsonl]" for split in ("train", "val")]
    reward = f"reward.custom_function.path={ROOT / 'configs' / 'smollm2_reward.py'}"
    began = time.monotonic()
    launcher = run.start("run", CONFIG, f"run.dir={run.dir}", f"model.path={MODEL}", reward, *files, *options)
    watch = MemoryWatch(launcher)
    try:
        assert launcher.wait(2400) == 0, run.log(launcher)[-3000:]
    finally:
        watch.close()
        run.close()
    parts = ", ".join(f"{what.split()[1]} {size / 2**30:.2f}" for what, size in sorted(watch.parts.items()))
    rows = run.metrics()
    print(f"\n{time.monotonic() - began:.0f} s; peak of all processes {watch.peak / 2**30:.2f} GiB: {parts}")
    for row in rows:
        print({k: round(v, 5) for k, v in sorted(row.items()) if k in SHOWN})
    assert watch.peak <= LIMIT_BYTES
    assert_nothing_too_old_was_trained(run)
    assert run.query("SELECT count(*) FROM steps WHERE applied") == [(3,)]
    assert max(row["staleness/max"] for row in rows) >= 1, "sampling went on beside training"
    assert all(row["rollout_corr/logprob_diff_mean"] <= 0.05 for row in rows)  # bfloat16: learner against vLLM
    signal = [row for row in rows if row["critic/score/max"] > 0]  # a critic that is 0 everywhere and no reward: none
    assert signal and all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in signal)
    before, after = _parameters(MODEL), _parameters(run.dir / "hf")
    assert max((after[n] - p).abs().max().item() for n, p in before.items()) > 0
    assert (run.dir / "adapter" / "adapter_model.safetensors").exists() == bool(options)


def _parameters(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


SHOWN = (
    "training/global_step", "critic/score/mean", "staleness/max", "rollout_corr/logprob_diff_mean", "timing_s/step",
    "actor/grad_norm", "actor/kl_loss", "critic/vf_loss", "weights/canary_difference", "weights/transfer_s",
    "timing_s/update_actor", "timing_s/update_critic", "perf/num_response_tokens",
)  # fmt: skip
