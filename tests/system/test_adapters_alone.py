"""`weights.adapters_only`: real vLLM computes the published adapter beside a base it has read itself."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.adapters import Adapters, is_adapter, sent_name
from common.config import Config, Weights
from common.errors import ConfigError, WeightError
from common.weights import encode_manifest, lay_out
from learner.canary import AdapterCanary
from tests import models
from tests.live_run import ROOT
from tests.system.test_engine import CONFIG, Bench, largest_difference
from tests.system.test_publish import until

pytestmark = pytest.mark.engine

ADAPTERS = Adapters(4, 8, "all-linear")
WEIGHTS = Weights(adapters_only=True, bucket_bytes=1 << 13, timeout_s=3.0, canary_every=1)
LORA = Config.model_validate(
    CONFIG.model_dump() | {"model": {"toy": True, "dtype": "float32", "lora_rank": 4, "lora_alpha": 8},
                           "weights": WEIGHTS.model_dump()}
)  # fmt: skip


def adapted_model(seed: int) -> Any:
    """The one base with random adapters."""
    model = models.tiny_model(0)
    ADAPTERS.inject(model)
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if is_adapter(name):
            p.data = 0.2 * torch.randn(p.shape)
    return model


def sent(model: Any) -> dict[str, torch.Tensor]:
    return {sent_name(n): p.detach() for n, p in model.named_parameters() if is_adapter(n)}


class AdapterBench(Bench):
    """The engine's folder holds the base."""

    def __init__(self, folder: Path, weights: Weights = WEIGHTS) -> None:
        self.base = models.write_folder(folder / "base", models.tiny_model(0))
        config = Config.model_validate(LORA.model_dump() | {"weights": weights.model_dump()})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "write_folder", lambda folder: self.base)
            super().__init__(folder, weights, config)
        self.publisher.prove_with(AdapterCanary(self.base, ADAPTERS, dtype="float32", max_tokens=100))

    def push(self, seed: int, *, wait: bool = True) -> Any:
        model = adapted_model(seed)
        self.publish(sent(model).items(), wait=wait)
        return model

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, wait: bool = True) -> None:
        self.version += 1
        self.publisher.publish(self.version, tensors)
        if wait:
            self.publisher.wait_held(self.version, timeout_s=20)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterBench]:
    b = AdapterBench(tmp_path_factory.mktemp("adapters"))
    yield b
    b.close()


def manifest_of(tensors: dict[str, torch.Tensor]) -> bytes:
    return encode_manifest(lay_out([(n, "float32", tuple(t.shape)) for n, t in tensors.items()], 1 << 13))


def test_an_adapter_that_is_not_this_models_is_refused_by_name(bench: AdapterBench) -> None:
    """Before the first version: what is no tensor of the adapter, is not there, or has another rank."""
    right = sent(adapted_model(0))
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    wrong = {
        "extra": right | {"model.norm.weight": torch.zeros(128)},
        "missing": {n: t for n, t in right.items() if n != name},
        "other rank": right | {name: torch.zeros(128, 2)},
    }
    says = {
        "extra": r"tensor model\.norm\.weight: the learner sends \[128\], this engine's model has none",
        "missing": rf"tensor {name}: the learner sends none, this engine's model has \[128, 4\]",
        "other rank": rf"tensor {name}: the learner sends \[128, 2\], this engine's model has \[128, 4\]",
    }
    for kind, tensors in wrong.items():
        with pytest.raises(WeightError, match=says[kind]):
            bench.run(bench.engine.stage(
                on_ready=lambda: None, manifest=manifest_of(tensors), number=1, version=0, ticket=[], rank=1,
                world_size=2, timeout_s=1.0,
            ))  # fmt: skip


def test_the_adapter_beside_the_base_gives_the_merged_models_logprobs(bench: AdapterBench) -> None:
    held = [bench.push(seed) for seed in (1, 2)]
    for completion in bench.run(bench.sample_many(8, 40)):
        assert completion.spans == [(1, 0, len(completion.response_ids))]
        assert largest_difference(held[1], completion) < 1e-4
        assert largest_difference(held[0], completion) > 0.1, "the version before is far away"
    assert 0 <= bench.publisher.stats()["weights/canary_difference"] < 1e-4
    base = models.tiny_model(0)
    assert largest_difference(base, completion) > 0.1, "so is the base"


def test_bytes_of_a_version(bench: AdapterBench) -> None:
    """What travels is the adapter: rank · (in + out) numbers a layer."""
    layout = bench.publisher._layout
    assert layout is not None
    linear = [m for m in models.tiny_model(0).model.modules() if isinstance(m, torch.nn.Linear)]
    wanted = sum(4 * 4 * (m.in_features + m.out_features) for m in linear)
    assert sum(e.num_bytes for e in layout.entries) == wanted
    assert wanted < sum(4 * p.numel() for p in models.tiny_model(0).parameters()) / 10


def test_requests_in_flight_change_adapters_at_a_token(bench: AdapterBench) -> None:
    """Each span's log-probs are those of the version it is stamped with, also with a reused prefix."""
    pushed = {bench.version: None} | {bench.version + 1 + i: 10 + i for i in range(4)}
    running = asyncio.run_coroutine_threadsafe(bench.sample_many(64, 300), bench.loop)
    until(lambda: len(bench.engine._running) == 64, 10, "the requests")
    by_version = {version: bench.push(seed) for version, seed in pushed.items() if seed is not None}
    mixed = [c for c in running.result(60) if len(c.spans) > 1]
    assert mixed, "no request was swapped under"
    for completion in mixed:
        for version, start, end in completion.spans:
            if version in by_version:
                assert largest_difference(by_version[version], completion, (start, end)) < 1e-4
                others = [m for v, m in by_version.items() if v != version]
                if end - start >= 8:
                    assert min(largest_difference(m, completion, (start, end)) for m in others) > 0.05


def test_an_adapter_that_lies_beside_another_base_is_disproved(bench: AdapterBench) -> None:
    """The canary is computed beside the learner's base."""
    proof = bench.publisher._canary
    other = copy.copy(proof)
    other._lm = adapted_model(0)
    with torch.no_grad():
        other._lm.get_submodule("model.layers.0.mlp.up_proj.base_layer").weight.mul_(1.05)
    since, held = len(bench.notes), bench.engine.version
    bench.publisher.prove_with(other)
    bench.publish(sent(adapted_model(20)).items(), wait=False)
    until(lambda: next((n for n in bench.notes[since:] if "canary: its log-probs differ" in n), None), 20, "a disproof")
    assert bench.engine.version == -1 < held
    bench.publisher.prove_with(proof)
    model = bench.push(21)
    assert largest_difference(model, bench.run(bench.sample(20))) < 1e-4


def test_a_layer_beside_which_vllm_computes_nothing_is_refused_by_name() -> None:
    from generators.adapter_slot import AdapterSlot

    manager = SimpleNamespace(
        model=SimpleNamespace(), modules={"model.layers.0.self_attn.qkv_proj": 0, "model.layers.0.mlp.down_proj": 0},
        packed_modules={"model.layers.0.self_attn.qkv_proj": [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]},
    )  # fmt: skip
    worker = SimpleNamespace(_adapter_manager=manager, lora_config=SimpleNamespace(lora_dtype=torch.float32))
    slot = AdapterSlot(worker, ADAPTERS, vocab_size=64)
    slot.refuse_unknown_layers({"model.layers.0.self_attn.v_proj.lora_A.weight": (4, 8)})
    with pytest.raises(ConfigError, match=r"no adapter beside model\.layers\.0\.mixer\.in_proj of this model"):
        slot.refuse_unknown_layers({"model.layers.0.mixer.in_proj.lora_A.weight": (4, 8)})


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_that_sends_adapters_alone(tmp_path: Path) -> None:
    """The quick start with adapters: engines wait for the base, then sample what the learner computes."""
    done = subprocess.run(
        [sys.executable, "launch.py", "run", "configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}",
         "run.max_steps=6", "model.lora_rank=8", "model.lora_alpha=16", "weights.adapters_only=true",
         "actor.optim.lr=5e-3", "weights.canary_every=1", "trainer.logger=[console]"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=350,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("training/global_step")]
    assert [row["weights/failures"] for row in steps] == [0] * 6 and steps[-1]["weights/version"] == 6
    assert max(row["weights/canary_difference"] for row in steps) < 1e-4
    assert steps[-1]["actor/grad_norm"] > 0


@pytest.mark.soak
def test_an_engine_without_staging_takes_adapters_too(tmp_path: Path) -> None:
    b = AdapterBench(tmp_path, WEIGHTS.model_copy(update={"staging": "none"}))
    try:
        for seed in (1, 2):
            model = b.push(seed)
            assert largest_difference(model, b.run(b.sample(40))) < 1e-4
    finally:
        b.close()
