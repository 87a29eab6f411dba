"""Samples → tensors → packed rows → tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from learner.batch import group_slices, make_batch, micro_batches, pack
from tests.learner_parts import make_config, make_groups, make_sample

RNG = np.random.default_rng(0)


def test_tensors_have_one_row_per_sample_and_zeros_beyond_its_end() -> None:
    samples = [
        make_sample(RNG, 7, 0, response_tokens=2, version=3, reward=1.0),
        make_sample(RNG, 7, 1, response_tokens=4, version=5, reward=0.0, finish_reason="length"),
    ]
    b = make_batch(samples)
    assert b.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert b.behavior_versions.tolist() == [[3, 3, 0, 0], [5, 5, 5, 5]]
    assert b.behavior_logprobs[0].tolist() == [*samples[0].behavior_logprobs.tolist(), 0, 0]
    assert b.scores.tolist() == [1.0, 0.0]
    assert b.group_ids.tolist() == [7, 7]
    assert b.truncated.tolist() == [False, True]
    assert b.num_tokens == 6 + 2 + 6 + 4


def test_mask_comes_from_lengths_whatever_the_ids() -> None:
    """No end token, or one that is also the padding: the mask is the same."""
    for ids in ([5, 6, 7], [5, 6, 0], [0, 0, 0], [5, 6, 1]):
        s = make_sample(RNG, 0, 0, response_tokens=3, response_ids=np.array(ids, dtype=np.int32))
        longer = make_sample(RNG, 0, 1, response_tokens=8)
        assert make_batch([s, longer]).mask[0].tolist() == [True] * 3 + [False] * 5


def test_tokens_that_the_policy_did_not_sample_are_not_in_the_mask_and_not_asked_for() -> None:
    s = make_sample(RNG, 0, 0, response_tokens=6, loss_mask_runs=(2, 3, 1))
    b = make_batch([s])
    assert b.mask[0].tolist() == [True, True, False, False, False, True]
    (micro,) = micro_batches(b, np.arange(1), token_budget=100)
    assert micro.targets.tolist() == s.response_ids[[0, 1, 5]].tolist()
    assert micro.scatter(torch.ones(3)).tolist() == [[1, 1, 0, 0, 0, 1]]


def test_ages_are_those_of_the_tokens_with_loss_weight() -> None:
    spans = ((2, 0, 2), (4, 2, 6))
    b = make_batch([make_sample(RNG, 0, 0, response_tokens=6, spans=spans)])
    assert b.ages(5) == (1, 3)
    masked = make_batch([make_sample(RNG, 0, 0, response_tokens=6, spans=spans, loss_mask_runs=(0, 2, 4))])
    assert masked.ages(5) == (1, 1)


@pytest.mark.parametrize("budget", [12, 20, 64, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_packed_rows_hold_each_sequence_once_with_restarting_positions(budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        make_sample(rng, i, 0, prompt_tokens=int(rng.integers(1, 7)), response_tokens=int(rng.integers(1, 6)))
        for i in range(17)
    ]
    b = make_batch(samples)
    rows = rng.permutation(17)[:13]
    seen = []
    for micro in micro_batches(b, rows, token_budget=budget):
        assert micro.input_ids.numel() <= budget
        asked = torch.zeros(len(micro.rows), micro.width, dtype=torch.int64)
        asked.view(-1)[micro.place] = micro.targets
        flat_ids, flat_positions = micro.input_ids.view(-1), micro.position_ids.view(-1)
        for i, row in enumerate(micro.rows.tolist()):
            s = samples[row]
            seen.append(row)
            assert asked[i, : len(s.response_ids)].tolist() == s.response_ids.tolist()
            first = int(micro.wanted[micro.place == i * micro.width]) + 1 - len(s.prompt_ids)
            whole = [*s.prompt_ids, *s.response_ids]
            assert flat_ids[first : first + len(whole)].tolist() == whole
            assert flat_positions[first : first + len(whole)].tolist() == list(range(len(whole)))
            assert first // micro.input_ids.shape[1] == (first + len(whole) - 1) // micro.input_ids.shape[1]
    assert sorted(seen) == sorted(rows.tolist())


def test_the_output_before_a_target_is_the_one_that_is_read() -> None:
    """The off-by-one: prompts of 3 and 5 tokens, read where the last prompt token lies."""
    short = make_sample(RNG, 0, 0, prompt_tokens=3, response_tokens=2)
    long = make_sample(RNG, 1, 0, prompt_tokens=5, response_tokens=1)
    (micro,) = micro_batches(make_batch([short, long]), np.arange(2), token_budget=1000)
    read_at = micro.position_ids.view(-1)[micro.wanted]
    of_row = micro.rows[micro.place // micro.width]
    assert read_at[of_row == 0].tolist() == [2, 3]
    assert read_at[of_row == 1].tolist() == [4]


def test_rows_per_forward_when_there_is_no_budget() -> None:
    b = make_batch(make_groups(make_config(), 0))
    sizes = [len(m.rows) for m in micro_batches(b, np.arange(16), token_budget=None, rows_per_batch=5)]
    assert sizes == [5, 5, 5, 1]


def test_packing_leaves_few_holes() -> None:
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(np.log(200) - 0.32, 0.8, 512).astype(np.int64) + 1, 1024)
    bins, width = pack(lengths, 16384)
    used = (bins.max() + 1) * width
    assert np.bincount(bins, weights=lengths).max() <= width
    assert used / lengths.sum() <= 1.03


def test_equal_lengths_get_a_row_each() -> None:
    bins, width = pack(np.full(512, 20), 16384)
    assert width == 20
    assert sorted(bins) == list(range(512))


def test_a_sequence_above_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="21 tokens does not fit into 20"):
        pack(np.array([3, 21]), 20)


def test_mini_batches_are_whole_groups_in_their_order() -> None:
    samples = [make_sample(RNG, g, i) for g in (4, 9, 2) for i in range(2)]
    b = make_batch(samples)
    assert [r.tolist() for r in group_slices(b, 2)] == [[0, 1, 2, 3], [4, 5]]
    assert [r.tolist() for r in group_slices(b, 64)] == [[0, 1, 2, 3, 4, 5]]


def test_nothing_under_the_mask_reaches_a_result() -> None:
    s = make_sample(RNG, 0, 0, response_tokens=4, loss_mask_runs=(2, 2))
    poisoned = dataclasses.replace(s, behavior_logprobs=np.array([-1, -1, np.nan, np.inf], dtype=np.float32))
    b = make_batch([poisoned])
    (micro,) = micro_batches(b, np.arange(1), token_budget=100)
    assert micro.scatter(torch.tensor([0.5, 0.5])).tolist() == [[0.5, 0.5, 0, 0]]
    assert b.behavior_logprobs[b.mask].isfinite().all()
