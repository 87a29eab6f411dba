"""Several ranks compute what one does, however rows fall on ranks and micro-batches."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.batch import make_batch
from learner.checkpoint import Checkpoints
from learner.models import load_models
from learner.packing import Packing, micro_batches, shares
from learner.served import weights_digest
from tests import rank_program
from tests.families import FAMILIES, write_family
from tests.learner_parts import alone, initial_weights, make_config, make_groups, make_sample
from tests.several_ranks import run_on_ranks


def _launch(world_size: int, weights: Path, out: Path) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    run_on_ranks(world_size, "tests.rank_program", str(weights), str(out), within_s=900)
    return torch.load(out / f"{world_size}.pt")


@pytest.mark.timeout(2000)  # waits for many small collectives: slow on a busy machine
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 3, 4), marks=pytest.mark.soak)], ids=str)
def test_ranks_and_layouts_change_no_gradient_and_no_weight(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Also: rank counts may change between checkpoints, ranks skip a step together, families attend over divided
    rows, and loading takes no more than a shard (see the program)."""
    weights = initial_weights(tmp_path / "weights", make_config())
    for family in FAMILIES:
        write_family(tmp_path / "families" / family, family)
    write_family(tmp_path / "families" / "one kv head", "llama tied", num_key_value_heads=1)
    unnamed = write_family(tmp_path / "families" / "unnamed", "qwen2")
    torch.save(load_file(unnamed / "model.safetensors"), unnamed / "pytorch_model.bin")
    (unnamed / "model.safetensors").unlink()
    large = write_family(tmp_path / "large", "qwen2", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    halves = {name: t.bfloat16() for name, t in load_file(large / "model.safetensors").items()}
    save_file(halves, large / "model.safetensors", metadata={"format": "pt"})
    for step in range(1, len(sizes) + 1):  # what a crash left behind under the names of checkpoints to come
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step}" / "__0_0.distcp").write_bytes(b"half")
    results = {n: _launch(n, weights, tmp_path) for n in sizes}
    reference = results[1][rank_program.GRID[0]]
    assert sum(bool(g.any()) for g in reference["gradients"].values()) == 26 + 28
    for n, ways in results.items():
        assert tuple(ways) == rank_program.GRID
        for way, result in ways.items():
            for name, gradient in result["gradients"].items():
                expected = reference["gradients"][name]
                assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), (n, way, name)
            for name, weight in result["weights"].items():
                assert weight.dtype == torch.float64
                assert (weight - reference["weights"][name]).abs().max() <= 1e-9, (n, way, name)

    rounded = {n: torch.load(tmp_path / f"{n}.bfloat16.pt") for n in sizes}
    for name, one in rounded[1]["once"].items():  # ranks add no error to that of bfloat16 itself
        exact = reference["gradients"][f"actor {name}"]
        error = (one - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.05, (name, error)
        for n, ways in rounded.items():
            for way, gradients in ways.items():
                assert (gradients[name] - exact).norm() <= 1.2 * error * exact.norm(), (n, way, name)

    more = {n: torch.load(tmp_path / f"{n}.more.pt") for n in sizes}
    for way, tensors in more[1].items():
        for name, weight in tensors.items():
            for n in sizes:
                assert (more[n][way][name] - weight).abs().max() <= 1e-6, (n, way, name)

    models = load_models(make_config(*rank_program.COMMON), weights, alone())
    checkpoints = Checkpoints(tmp_path / "checkpoints", run_id="test", keep=9, ranks=alone())
    assert checkpoints.steps() == list(range(1, len(sizes) + 1))
    state = checkpoints.load(checkpoints.latest(), models)
    assert state["digests"] == [weights_digest(t.module) for t in models.trainees()]


def test_the_grid_has_each_pair_of_values() -> None:
    columns = list(zip(*rank_program.GRID, strict=True))
    for a, b in itertools.combinations(columns, 2):
        assert set(zip(a, b, strict=True)) == set(itertools.product(set(a), set(b)))


def _lognormal_batch() -> tuple[object, np.ndarray]:
    """512 samples of lognormal lengths, mean 200, at most 1,024, each with a prompt of its own."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(200) - 0.32, 0.8, 512), 8, 1024).astype(int)
    samples = [make_sample(rng, i, 0, prompt_tokens=4, response_tokens=int(n) - 3) for i, n in enumerate(lengths)]
    return make_batch(samples), np.arange(512)


@pytest.mark.parametrize("world_size", [2, 8])
def test_long_and_short_samples_are_spread_evenly(world_size: int) -> None:
    batch, rows = _lognormal_batch()
    parts = shares(batch, rows, Packing(4096), world_size)
    assert sorted(np.concatenate([p.rows for p in parts])) == rows.tolist()
    costs = [sum(n * Packing(4096).cost(n) for n in p.lengths.tolist()) for p in parts]
    assert max(costs) / np.mean(costs) <= 1.01


@pytest.mark.parametrize(
    "packing",
    [Packing(24), Packing(None, rows_per_forward=3), Packing(40, packed=False)],
    ids=["packed", "by count", "padded"],
)
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_every_rank_makes_as_many_forwards_and_each_row_is_seen_once(packing: Packing, num_rows: int) -> None:
    batch = make_batch(make_groups(make_config(), 0))
    rows = np.arange(num_rows)
    plans = [micro_batches(batch, rows, packing, rank=r, world_size=4) for r in range(4)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(int(r) for plan in plans for micro in plan for r in micro.rows) == rows.tolist()
    assert sum(len(micro.targets) for plan in plans for micro in plan) == int(batch.mask[:num_rows].sum())
