"""Samples → tensors."""

from __future__ import annotations

import numpy as np
import pytest

from learner.batch import group_slices, make_batch
from tests.learner_parts import make_sample

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
    assert b.num_tokens == 6 + 2 + 6 + 4


def test_mask_comes_from_lengths_whatever_the_ids() -> None:
    """No end token, or one that is also the padding: the mask is the same."""
    for ids in ([5, 6, 7], [5, 6, 0], [0, 0, 0], [5, 6, 1]):
        s = make_sample(RNG, 0, 0, response_tokens=3, response_ids=np.array(ids, dtype=np.int32))
        longer = make_sample(RNG, 0, 1, response_tokens=8)
        assert make_batch([s, longer]).mask[0].tolist() == [True] * 3 + [False] * 5


def test_tokens_that_the_policy_did_not_sample_are_not_in_the_mask() -> None:
    b = make_batch([make_sample(RNG, 0, 0, response_tokens=6, loss_mask_runs=(2, 3, 1))])
    assert b.mask[0].tolist() == [True, True, False, False, False, True]


def test_ages_are_those_of_the_tokens_with_loss_weight() -> None:
    spans = ((2, 0, 2), (4, 2, 6))
    b = make_batch([make_sample(RNG, 0, 0, response_tokens=6, spans=spans)])
    assert b.ages(5) == (1, 3)
    masked = make_batch([make_sample(RNG, 0, 0, response_tokens=6, spans=spans, loss_mask_runs=(0, 2, 4))])
    assert masked.ages(5) == (1, 1)
    assert b.ages(5, limit=2)[1] <= 2 and int(b.young(5, 99).sum()) == int(b.mask.sum()) > int(b.young(5, 2).sum())


def test_a_greedy_sample_is_no_row_but_the_baseline_of_its_group() -> None:
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    samples = [
        make_sample(RNG, group, i, reward=group / 10 + i, **({"sampling": greedy} if i == 2 else {}))
        for group in (3, 4) for i in range(3)
    ]  # fmt: skip
    b = make_batch(samples)
    assert len(b) == 4 and b.group_ids.tolist() == [3, 3, 4, 4]
    assert b.baselines is not None and b.baselines.tolist() == pytest.approx([2.3, 2.3, 2.4, 2.4])
    assert make_batch(samples[:2]).baselines is None


def test_mini_batches_are_whole_groups_in_their_order() -> None:
    samples = [make_sample(RNG, g, i) for g in (4, 9, 2) for i in range(2)]
    b = make_batch(samples)
    assert [r.tolist() for r in group_slices(b, 2)] == [[0, 1, 2, 3], [4, 5]]
    assert [r.tolist() for r in group_slices(b, 64)] == [[0, 1, 2, 3, 4, 5]]
