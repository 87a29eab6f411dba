"""What the learner does on one GPU, in at most 6 minutes: `python scripts/learner_gpu.py [--dry] [--json FILE]`.

A random Qwen2 of 0.5 B parameters in bfloat16: chunked log-probs against whole ones, packed rows against
padded ones, masks against flash attention (varlen), the share of the GPU's arithmetic that a training step
uses (MFU), and offloading. `--dry`: the same code on the CPU with a tiny model, to see that it runs (without
flash attention); its figures mean nothing. Exits with 1 if a comparison fails, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.learner import samples  # noqa: E402
from common.config import Config  # noqa: E402
from common.loading import load_config  # noqa: E402
from learner.batch import Batch, make_batch  # noqa: E402
from learner.head import LinearHead  # noqa: E402
from learner.logprobs import token_logprobs  # noqa: E402
from learner.loop import train_step  # noqa: E402
from learner.models import Models, load_models  # noqa: E402
from learner.offload import at_work  # noqa: E402
from learner.packing import MicroBatch, Packing, micro_batches  # noqa: E402
from learner.ranks import Ranks, join_ranks, leave_ranks  # noqa: E402
from learner.report import Clock  # noqa: E402
from learner.served import weights_digest  # noqa: E402
from learner.settings import live_settings  # noqa: E402
from learner.updates import Counts, accumulate  # noqa: E402

PEAK_FLOPS = 989e12  # H100, H200: bfloat16, dense


@dataclass(frozen=True)
class Size:
    """What is measured with."""

    shape: dict[str, int]
    tokens: int  # of the log-probs
    chunk: int | None  # tokens of a chunk; None: the learner's own
    samples: int
    cap: int  # longest response
    budget: int  # tokens of a forward
    times: int


LARGE = Size(
    {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
     "num_attention_heads": 14, "num_key_value_heads": 2},
    tokens=8192, chunk=None, samples=256, cap=4096, budget=32_768, times=3,
)  # fmt: skip
TINY = Size(
    {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2}, tokens=256, chunk=50, samples=16, cap=64, budget=256, times=1,
)  # fmt: skip


class Bench:
    """The figures, and the comparisons that failed."""

    def __init__(self, size: Size, ranks: Ranks, folder: Path) -> None:
        self.size, self.ranks, self.folder = size, ranks, folder
        self.figures: dict[str, float] = {}
        self.faults: list[str] = []
        self.batch = make_batch(samples(size.samples, prompts=size.samples // 8, cap=size.cap), device=ranks.device)

    def figure(self, name: str, value: float, unit: str, *, at_most: float | None = None) -> None:
        self.figures[name] = value
        bad = at_most is not None and not value <= at_most
        self.faults += [f"{name}={value:.4g} is above {at_most:g}"] if bad else []
        print(f"{name:<44} {value:>12.5g} {unit}{'   FAILED' if bad else ''}", flush=True)

    def config(self, *options: str) -> Config:
        size = self.size
        return load_config([], [
            f"model.path={self.folder}", "model.dtype=bfloat16", "data.task=reverse_digits", "run.id=gpu",
            f"data.train_batch_size={size.samples // 8}", "rollout.n=8", "data.max_prompt_length=32",
            f"data.max_response_length={size.cap}", f"actor.ppo_max_token_len_per_gpu={size.budget}",
            "model.enable_gradient_checkpointing=true", "actor.share_prompts=false", "actor.optim.lr=1e-5", *options,
        ])  # fmt: skip

    def models(self, *options: str) -> Models:
        return load_models(self.config(*options), self.folder, self.ranks)

    def seconds(self, act: Callable[[], Any]) -> float:
        """The fastest of some runs, after one that does not count."""
        act()
        taken = []
        for _ in range(self.size.times):
            self.wait()
            start = time.perf_counter()
            act()
            self.wait()
            taken.append(time.perf_counter() - start)
        return min(taken)

    def wait(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, act: Callable[[], Any]) -> int:
        """Most memory held on the GPU beyond what was held before; 0 on a CPU."""
        if self.ranks.device.type != "cuda":
            act()
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        act()
        self.wait()
        return torch.cuda.max_memory_allocated() - before


def chunked_logprobs(b: Bench) -> None:
    """Forward and backward of the LM head and its log-probs, chunked against all logits at once."""
    size, device = b.size, b.ranks.device
    vocab, hidden_size = size.shape["vocab_size"], size.shape["hidden_size"]
    hidden = torch.randn(size.tokens, hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, hidden_size, device=device, dtype=torch.bfloat16).mul_(0.05).requires_grad_()
    targets = torch.randint(vocab, (size.tokens,), device=device)
    temperatures = torch.ones(size.tokens, device=device)

    def chunked() -> Tensor:
        return token_logprobs(
            hidden, LinearHead(weight), targets, temperatures, vocab_size=vocab, with_entropy=False,
            chunk_tokens=size.chunk,
        )[0]  # fmt: skip

    def whole() -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def backward(act: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        act().sum().backward()

    results = []
    for act in (whole, chunked):
        backward(act)
        with torch.no_grad():
            results.append((act(), hidden.grad.float(), weight.grad.float()))
    for name, a, c in zip(("value", "hidden", "weight"), *results, strict=True):
        b.figure(f"logprobs.difference.{name}", float((a - c).abs().max() / a.abs().max()), "of largest", at_most=0.02)
    memory = {act: b.peak_bytes(functools.partial(backward, act)) for act in (whole, chunked)}
    seconds = {act: b.seconds(functools.partial(backward, act)) for act in (whole, chunked)}
    if memory[whole]:
        b.figure("logprobs.memory", memory[chunked] / memory[whole], "of all at once", at_most=0.25)
    b.figure("logprobs.time", seconds[chunked] / seconds[whole], "of all at once")


def layouts(b: Bench) -> None:
    """Useful tokens per second of forward and backward: packed, padded, flash attention over packed rows."""
    packed = Packing(b.size.budget, share_prompts=False, hidden_size=b.size.shape["hidden_size"])
    ways: dict[str, tuple[Packing, tuple[str, ...]]] = {
        "packed": (packed, ()),
        "padded": (replace(packed, packed=False), ()),
        "padded_in_order": (Packing(None, rows_per_forward=8, packed=False), ()),
    }
    if b.ranks.device.type == "cuda":
        ways["packed_varlen"] = (packed, ("model.attn_implementation=varlen",))
    logprobs = {}
    for name, (packing, options) in ways.items():
        models = b.models(*options)
        micros = micro_batches(b.batch, np.arange(len(b.batch)), packing)
        logprobs[name] = _logprobs(models, b.batch, micros)
        work = functools.partial(_forward_backward, models, micros, b.ranks)
        rate = b.batch.num_tokens / b.seconds(work)
        b.figure(f"training_tokens_per_s.{name}", rate, "useful tokens/s")
        b.figure(f"mfu.{name}", rate * flops_per_token(b) / PEAK_FLOPS, "of the GPU's peak, useful tokens")
        b.figure(f"peak_GB.{name}", b.peak_bytes(work) / 1e9, "GB beyond weights and optimizer")
        del models, work
        gc.collect()  # a sharded module is part of a cycle
    for name, values in logprobs.items():
        difference = (values - logprobs["padded_in_order"]).abs()[b.batch.mask].mean()
        b.figure(f"logprobs.{name}_to_padded_in_order", float(difference), "mean, bfloat16", at_most=0.05)


def flops_per_token(b: Bench) -> float:
    """Of forward and backward, without recomputing: 6 per parameter of a matrix, and causal attention."""
    s, lengths = b.size.shape, b.batch.lengths.astype(float)
    h, f, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    kv = h * s["num_key_value_heads"] // s["num_attention_heads"]
    matrices = layers * (2 * h * h + 2 * h * kv + 3 * h * f) + s["vocab_size"] * h
    attended = float((lengths**2).sum() / lengths.sum()) / 2  # keys that a token sees, on average
    return 6 * matrices + 3 * 4 * layers * h * attended


def steps(b: Bench) -> None:
    """Whole steps: their time, what stays on the GPU between them, and that offloading changes no bit."""
    offload = "actor.fsdp_config"
    ways = {
        "on_device": (),
        "offloaded": (f"{offload}.param_offload=true", f"{offload}.optimizer_offload=true"),
        "offload_policy": (f"{offload}.offload_policy=true",),
    }
    for name, options in ways.items():
        models = b.models(*options)
        first = weights_digest(models.actor.module)
        b.figure(f"step_s.{name}", b.seconds(functools.partial(_step, b, models, options)), "s, log-probs and update")
        before = weights_digest(models.actor.module)
        with at_work(models.actor.module, models.actor.optimizer):
            pass
        if before == first:
            b.faults.append(f"steps {name}: changed no weight")
        if weights_digest(models.actor.module) != before:
            b.faults.append(f"steps {name}: to the GPU and back changed the weights")
        if b.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
            limit = None if name == "on_device" else 0.2 * b.figures["held_GB.on_device"]
            b.figure(f"held_GB.{name}", torch.cuda.memory_allocated() / 1e9, "GB between steps", at_most=limit)
        del models
        gc.collect()


def _step(b: Bench, models: Models, options: tuple[str, ...]) -> None:
    config = b.config(*options)
    outcome = train_step(
        models, b.batch, config=config, settings=live_settings(config, NoLimits()), step=1, version=0, limit=0,
        ranks=b.ranks, clock=Clock(),
    )  # fmt: skip
    if not outcome.applied:
        b.faults.append(f"a step with {options} was not applied")


class NoLimits:
    def limit(self, name: str) -> None:
        return None


@torch.no_grad()
def _logprobs(models: Models, batch: Batch, micros: list[MicroBatch]) -> Tensor:
    out = torch.zeros_like(batch.behavior_logprobs)
    for micro in micros:
        out[micro.rows] = micro.scatter(models.actor.module(micro)[0])
    return out


def _forward_backward(models: Models, micros: list[MicroBatch], ranks: Ranks) -> None:
    module = models.actor.module

    def loss(micro: MicroBatch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        return module(micro)[0].sum() / counts.num_tokens, {}

    accumulate(module, micros, loss, Counts(sum(len(m.targets) for m in micros), 1, 1.0), ranks)
    models.actor.optimizer.zero_grad()


def write_model(folder: Path, size: Size) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **size.shape, max_position_embeddings=32_768, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:  # far from flat, so that a sequence that sees another one shows
                p.normal_(0, p.shape[1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)


def main(args: argparse.Namespace) -> int:
    if not args.dry and not torch.cuda.is_available():
        print("no GPU here; --dry runs the same code on the CPU", file=sys.stderr)
        return 2
    began = time.monotonic()
    ranks = join_ranks()
    try:
        with tempfile.TemporaryDirectory() as folder:
            size = TINY if args.dry else LARGE
            write_model(Path(folder), size)
            bench = Bench(size, ranks, Path(folder))
            for part in (chunked_logprobs, layouts, steps):
                torch.manual_seed(0)
                part(bench)
    finally:
        leave_ranks()
    print(f"{time.monotonic() - began:.0f} s")
    for fault in bench.faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps({"figures": bench.figures, "faults": bench.faults}, indent=1))
    return 1 if bench.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", help="write the figures to this file")
    sys.exit(main(parser.parse_args()))
