"""The supervised start: a random model becomes sometimes right, and is loadable by others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import Warmup
from common.errors import Stopped
from learner.initial import initial_folder, load_tokenizer, random_toy, served_folder
from learner.warmup import Lesson, lesson_of, sampled_score, warm_up
from tests.learner_parts import make_config
from tests.models import tiny_model, write_folder

CONFIG = make_config("model.warmup.steps=600", "model.warmup.target_score=0.12", "data.max_response_length=8")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_toy_learns_to_be_right_sometimes(tmp_path: Path) -> None:
    served = served_folder(CONFIG, tmp_path)
    tokenizer = load_tokenizer(served, CONFIG)
    states: list[str] = []
    folder, result = initial_folder(CONFIG, tmp_path, served, tokenizer, stop=threading.Event(), on_state=states.append)
    assert folder == served
    assert result is not None
    assert result.score >= 0.12
    assert result.steps < 600
    assert result.steps % 5 == 0
    assert len(states) == result.steps // 5
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == 304_256


def test_any_model_and_any_pairs() -> None:
    """A user's lesson: answer with the letter asked for; reaches its target and stops there."""
    actor = random_toy(CONFIG)
    tokenizer = load_tokenizer_of_toy()
    lesson = Lesson(
        lambda i: ([{"role": "user", "content": f"say {'abcd'[i % 4]}:"}], "abcd"[i % 4]),
        lambda text, answer: float(text == answer),
    )
    assert sampled_score(actor, tokenizer, lesson, max_new_tokens=3) < 0.1
    checks: list[tuple[int, float, float]] = []
    result = warm_up(
        actor, tokenizer, lesson, Warmup(steps=300, batch_size=16, target_score=0.8, check_every=10),
        max_new_tokens=3, seed=0, on_check=lambda *c: checks.append(c),
    )  # fmt: skip
    assert result.score >= 0.8
    assert [c[0] for c in checks] == list(range(10, result.steps + 1, 10))
    assert checks[-1][2] < checks[0][2]  # the loss fell


def test_a_stop_ends_it() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped, match="warm-up"):
        warm_up(
            random_toy(CONFIG), load_tokenizer_of_toy(), lesson_of(CONFIG), Warmup(steps=100, check_every=1),
            max_new_tokens=8, seed=0, stop=stop,
        )  # fmt: skip


def test_pairs_of_files_are_their_prompts_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"data_source": "x", "prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}}\n'
        '{"data_source": "x", "prompt": [{"role": "user", "content": "c"}], "reward_model": {"ground_truth": "d"},'
        ' "extra_info": {"answer": "so d"}}\n'
    )
    lesson = lesson_of(make_config("data.task=null", f"data.train_files={file}"))
    assert lesson.pair(0) == ([{"role": "user", "content": "a"}], "b")
    assert lesson.pair(3) == ([{"role": "user", "content": "c"}], "so d")
    assert [lesson.score(" b\n", "b"), lesson.score("bb", "b")] == [1.0, 0.0]


def load_tokenizer_of_toy() -> Any:
    from learner.toy import toy_tokenizer

    return toy_tokenizer()


def test_a_users_model_is_warmed_up_in_a_copy(tmp_path: Path) -> None:
    """`model.path` stays as it is and is what engines start from; the run's own folder has the weights."""
    own = write_folder(tmp_path / "own", tiny_model(0, scale=1.0))
    before = (own / "model.safetensors").read_bytes()
    config = make_config(
        "model.toy=false", f"model.path={own}", "model.warmup.steps=2", "model.warmup.check_every=1",
        "model.warmup.target_score=0.9",
    )  # fmt: skip
    served = served_folder(config, tmp_path / "run")
    tokenizer = load_tokenizer(served, config)
    folder, result = initial_folder(config, tmp_path / "run", served, tokenizer, stop=threading.Event())
    assert (served, folder) == (own, tmp_path / "run" / "model")
    assert result is not None
    assert result.steps == 2
    assert (own / "model.safetensors").read_bytes() == before
    first, second = (AutoModelForCausalLM.from_pretrained(f) for f in (own, folder))
    assert not torch.equal(first.model.norm.weight, second.model.norm.weight)
    assert load_tokenizer(folder, config)("ab")["input_ids"] == tokenizer("ab")["input_ids"]
    again, none = initial_folder(config, tmp_path / "run", served, tokenizer, stop=threading.Event())
    assert (again, none) == (folder, None)
