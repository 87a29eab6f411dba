"""Toy tasks: disjoint splits, seeded order, exact scores."""

import pytest

from common.errors import ConfigError
from common.order import permute
from common.tasks import TASKS, get_task
from tests.unit.test_data import fault_free


def _digits(row):
    return row["prompt"][0]["content"].removeprefix("reverse ").removesuffix("=")


def test_reverse_digits_row_is_in_verls_columns_and_scores_exactly():
    task = get_task("reverse_digits")
    row = task.row("train", 0, seed=0)
    truth = row["reward_model"]["ground_truth"]
    assert fault_free(row)
    assert len(truth) == 5 and truth == _digits(row)[::-1]
    assert task.score(truth, truth) == 1.0
    assert task.score(truth + "1", truth) == task.score(truth[:4], truth) == task.score("", truth) == 0.0


def test_splits_are_disjoint_and_complete_whatever_the_seed():
    task = get_task("reverse_digits")
    held_out = {_digits(task.row("val", i, seed=3)) for i in range(task.num_rows("val"))}
    assert len(held_out) == task.num_rows("val") == 5_000
    other_seed = {_digits(task.row("train", i, seed=9)) for i in range(0, task.num_rows("train"), 7)}
    assert len(other_seed) == -(-95_000 // 7)  # no problem twice
    assert not held_out & other_seed


def test_warmup_pairs_are_right_never_held_out_and_endless():
    task = get_task("reverse_digits")
    held_out = {_digits(task.row("val", i, seed=0)) for i in range(5_000)}
    for i in (*range(2_000), 10**7):
        prompt, answer = task.pair(i, seed=0)
        digits = prompt.removeprefix("reverse ").removesuffix("=")
        assert answer == digits[::-1] and digits not in held_out


@pytest.mark.parametrize("name", sorted(TASKS))
def test_alphabet_covers_prompts_and_answers(name):
    task = TASKS[name]
    assert len(set(task.alphabet)) == len(task.alphabet)
    for i in range(200):
        prompt, answer = task.pair(i, seed=1)
        assert set(prompt + answer) <= set(task.alphabet)


def test_order_depends_on_the_seed_and_repeats_with_it():
    task = get_task("reverse_digits")
    first = [task.row("train", i, seed=1) for i in range(20)]
    assert first == [task.row("train", i, seed=1) for i in range(20)]
    assert first != [task.row("train", i, seed=2) for i in range(20)]


def test_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean reverse_digits"):
        get_task("reverse_digit")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_permute_is_a_bijection(size):
    assert sorted(permute(i, size, "key") for i in range(size)) == list(range(size))


def test_permute_refuses_what_is_outside():
    with pytest.raises(IndexError):
        permute(5, 5, "key")
