"""Packed rows: what each output sees is its own sequence and nothing else; results go back where they belong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.wire import Sample
from learner.batch import make_batch
from learner.packing import MicroBatch, Packing, micro_batches, pack
from tests.learner_parts import make_config, make_groups, make_sample

RNG = np.random.default_rng(0)
SMALL = {"hidden_size": 8}  # a model for which attention is dear


def _random_samples(seed: int, *, groups: int = 5, same_prompts: bool = True) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for g in range(groups):
        prompt = rng.integers(3, 64, rng.integers(1, 9)).astype(np.int32)
        for i in range(int(rng.integers(1, 6))):
            s = make_sample(rng, g, i, response_tokens=int(rng.integers(1, 7)), prompt_ids=prompt)
            if not same_prompts and i == 1:
                s = dataclasses.replace(s, prompt_ids=prompt[::-1].copy() + 1)
            samples.append(s)
    return samples


def _seen_by(micro: MicroBatch, output: int) -> tuple[list[int], list[int]]:
    """(token ids, positions) that the output at a flat index depends on."""
    row, column = divmod(output, micro.input_ids.shape[1])
    positions = micro.position_ids[row].tolist()
    if (mask := micro.attention_mask()) is not None:
        keys = mask[row, 0, column].nonzero().flatten().tolist()
    else:  # Hugging Face: a sequence begins wherever positions do not go on counting
        first = column
        while first > 0 and positions[first] == positions[first - 1] + 1:
            first -= 1
        keys = list(range(first, column + 1))
    return micro.input_ids[row, keys].tolist(), [positions[k] for k in keys]


@pytest.mark.parametrize("hidden", [8, 10_000])
@pytest.mark.parametrize("budget", [16, 40, 5000, None])
@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
@pytest.mark.parametrize("seed", range(4))
def test_each_output_sees_its_own_sequence_and_nothing_else(
    seed: int, layout: str, budget: int | None, hidden: int
) -> None:
    samples = _random_samples(seed, same_prompts=seed != 3)
    batch = make_batch(samples)
    rows = np.arange(len(samples))[seed:]
    asked = []
    packing = Packing(
        budget, rows_per_forward=4, packed=layout != "padded", share_prompts=layout == "shared", hidden_size=hidden
    )
    for micro in micro_batches(batch, rows, packing):
        assert budget is None or micro.input_ids.numel() <= budget
        assert budget is not None or len(micro.rows) <= 4
        assert layout != "padded" or len(micro.input_ids) == len(micro.rows)
        for k, output in enumerate(micro.wanted.tolist()):
            i, t = divmod(int(micro.place[k]), micro.num_columns)
            s = samples[micro.rows[i]]
            before = [*s.prompt_ids, *s.response_ids[:t]]
            assert _seen_by(micro, output) == (before, list(range(len(before))))
            assert micro.targets[k] == s.response_ids[t]
            asked.append((int(micro.rows[i]), t))
    assert sorted(asked) == [(r, t) for r in rows for t in range(len(samples[r].response_ids))]


def test_a_prompt_stands_once_for_its_group() -> None:
    samples = [make_sample(RNG, g, i, prompt_tokens=14, response_tokens=6) for g in range(4) for i in range(8)]
    samples = [dataclasses.replace(s, prompt_ids=samples[s.group * 8].prompt_ids) for s in samples]
    batch = make_batch(samples)
    (micro,) = micro_batches(batch, np.arange(32), Packing(10_000, hidden_size=128))
    assert micro.input_ids.numel() == 4 * (14 + 8 * 5)
    (alone,) = micro_batches(batch, np.arange(32), Packing(10_000, share_prompts=False, hidden_size=128))
    assert alone.input_ids.numel() == 32 * 19
    assert not alone.shared and alone.attention_mask() is None


def test_a_prompt_is_not_shared_where_attention_would_cost_more() -> None:
    prompt = np.arange(3, 7, dtype=np.int32)
    samples = [make_sample(RNG, 0, i, prompt_ids=prompt, response_tokens=400) for i in range(8)]
    for hidden, shared in ((128, False), (100_000, True)):
        micro = micro_batches(make_batch(samples), np.arange(8), Packing(20_000, hidden_size=hidden))[0]
        assert micro.shared is shared


def test_a_laid_out_batch_takes_few_bytes_a_token() -> None:
    """Masks, whose size grows with the square of the width, are made by each forward."""
    rng = np.random.default_rng(0)
    samples = []
    for g in range(4):
        prompt = rng.integers(3, 64, 256).astype(np.int32)
        samples += [make_sample(rng, g, i, response_tokens=300, prompt_ids=prompt) for i in range(8)]
    batch = make_batch(samples)
    micros = micro_batches(batch, np.arange(32), Packing(8192, hidden_size=3584))
    assert all(m.shared for m in micros)
    held = [v for m in micros for v in vars(m).values() if isinstance(v, torch.Tensor)]
    assert sum(t.nbytes for t in held) / batch.num_tokens <= 64


class _Reads(TorchDispatchMode):
    """Operations after which the host has to wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense):
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def test_laying_out_does_not_wait_for_the_device() -> None:
    batch = make_batch(make_groups(make_config(), 0))
    with _Reads() as reads:
        assert len(micro_batches(batch, np.arange(len(batch)), Packing(40))) > 2
    assert reads.seen == []


def test_only_sampled_tokens_are_asked_for() -> None:
    s = make_sample(RNG, 0, 0, response_tokens=6, loss_mask_runs=(2, 3, 1))
    (micro,) = micro_batches(make_batch([s]), np.arange(1), Packing(100))
    assert micro.targets.tolist() == s.response_ids[[0, 1, 5]].tolist()
    assert micro.scatter(torch.ones(3)).tolist() == [[1, 1, 0, 0, 0, 1]]
    assert len(_seen_by(micro, int(micro.wanted[2]))[0]) == 6 + 5  # it does see what the tool said


def test_nothing_under_the_mask_reaches_a_result() -> None:
    s = make_sample(RNG, 0, 0, response_tokens=4, loss_mask_runs=(2, 2))
    poisoned = dataclasses.replace(s, behavior_logprobs=np.array([-1, -1, np.nan, np.inf], dtype=np.float32))
    batch = make_batch([poisoned])
    (micro,) = micro_batches(batch, np.arange(1), Packing(100))
    assert micro.scatter(torch.tensor([0.5, 0.5])).tolist() == [[0.5, 0.5, 0, 0]]
    assert batch.behavior_logprobs[batch.mask].isfinite().all()


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_per_forward_when_there_is_no_budget(packed: bool) -> None:
    batch = make_batch(make_groups(make_config(), 0))
    micros = micro_batches(batch, np.arange(16), Packing(None, rows_per_forward=5, packed=packed))
    assert [m.rows.tolist() for m in micros] == [list(range(i, min(i + 5, 16))) for i in (0, 5, 10, 15)]
    useful = [int((batch.lengths[m.rows.numpy()] - 1).sum()) for m in micros]
    processed = [m.input_ids.numel() for m in micros]
    assert all(a >= b for a, b in zip(processed, useful, strict=True))
    if not packed:
        assert processed == [len(m.rows) * int(batch.lengths[m.rows.numpy()].max() - 1) for m in micros]


def test_padded_rows_under_a_budget_lie_with_their_like() -> None:
    rng = np.random.default_rng(5)
    samples = [make_sample(rng, i, 0, prompt_tokens=2, response_tokens=n) for i, n in enumerate((9, 1, 8, 2, 1, 9))]
    micros = micro_batches(make_batch(samples), np.arange(6), Packing(20, packed=False))
    assert [(m.rows.tolist(), tuple(m.input_ids.shape)) for m in micros] == [
        ([0, 5], (2, 10)), ([2, 3], (2, 9)), ([1, 4], (2, 2))
    ]  # fmt: skip
    with pytest.raises(ValueError, match="10 tokens do not fit into 9"):
        micro_batches(make_batch(samples), np.arange(6), Packing(9, packed=False))


def test_packing_leaves_few_holes() -> None:
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(np.log(200) - 0.32, 0.8, 512).astype(np.int64) + 1, 1024)
    bins, width = pack(lengths, Packing(16384))
    assert np.bincount(bins, weights=lengths).max() <= width
    assert (bins.max() + 1) * width / lengths.sum() <= 1.03


def test_equal_lengths_get_a_row_each() -> None:
    bins, width = pack(np.full(512, 20), Packing(16384))
    assert width == 20
    assert sorted(bins) == list(range(512))


def test_a_sequence_above_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="21 tokens do not fit into 20"):
        pack(np.array([3, 21]), Packing(20))
