"""Procedural tasks: rows in verl's columns, made when asked for, with their score.

A task that a small model learns on a CPU in a minute or two; the same tasks serve the tests. Train
and held-out rows never share a problem, whatever the seed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from common.errors import ConfigError
from common.order import permute

Split = Literal["train", "val"]
Row = dict[str, Any]
REWARD_CALL = ("data_source", "solution_str", "ground_truth", "extra_info")  # keywords of a reward function


class Task(Protocol):
    """What the broker, the rewards, the toy tokenizer and the warm-up need of a task."""

    @property
    def name(self) -> str: ...

    @property
    def alphabet(self) -> str:
        """Each character that prompts and answers can contain, once."""

    def num_rows(self, split: Split) -> int: ...

    def row(self, split: Split, i: int, *, seed: int) -> Row:
        """Row i (0 ≤ i < ``num_rows``) of a split, in an order drawn from ``seed``."""

    def pair(self, i: int, *, seed: int) -> tuple[str, str]:
        """The i-th (prompt, right answer) for the supervised warm-up: train problems, any i ≥ 0."""

    def score(self, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float: ...


@dataclass(frozen=True)
class ReverseDigits:
    """``reverse 48213=`` → ``31284``; 1 for the exact string, else 0."""

    name: str = "reverse_digits"
    num_digits: int = 5
    alphabet: str = " 0123456789=ersv"

    @property
    def num_problems(self) -> int:
        return int(10**self.num_digits)

    def num_rows(self, split: Split) -> int:
        num_val = self.num_problems // 20
        return num_val if split == "val" else self.num_problems - num_val

    def row(self, split: Split, i: int, *, seed: int) -> Row:
        digits = self._digits(split, i, f"{seed}/{split}")
        return {
            "data_source": self.name,
            "prompt": [{"role": "user", "content": f"reverse {digits}="}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": digits[::-1]},
            "extra_info": {"split": split, "index": i},
        }

    def pair(self, i: int, *, seed: int) -> tuple[str, str]:
        epoch, i = divmod(i, self.num_rows("train"))
        digits = self._digits("train", i, f"{seed}/warmup/{epoch}")
        return f"reverse {digits}=", digits[::-1]

    def score(self, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
        return float(solution_str == ground_truth)

    def _digits(self, split: Split, i: int, order: str) -> str:
        """The split is cut once, independently of the seed; the seed only orders its problems."""
        place = permute(i, self.num_rows(split), order) + (self.num_rows("train") if split == "val" else 0)
        return f"{permute(place, self.num_problems, self.name):0{self.num_digits}d}"


TASKS: dict[str, Task] = {task.name: task for task in (ReverseDigits(),)}


def get_task(name: str) -> Task:
    """The task called ``name``.

    Raises:
        ConfigError: with the tasks there are.
    """
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(TASKS))}"
    raise ConfigError(f"data.task={name!r}: no such task; {hint}")
