"""Rewards: from a row and the text of a response to a number.

A row's ``data_source`` chooses the scorer (verl's names, and the procedural tasks), unless the
config names a function of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.answers import answer_kind
from common.tasks import TASKS
from generators.rewards import gsm8k, maths

# A scorer: (data_source, solution_str, ground_truth, extra_info) -> float.
ComputeScore = Callable[[str, str, Any, "dict[str, Any] | None"], float]

TIMEOUT, ERROR, INVALID = "reward_timeout", "reward_error", "reward_invalid"


@dataclass(frozen=True)
class Score:
    """What became of one response."""

    value: float | None  # None: see `fault`
    parts: dict[str, float] = field(default_factory=dict)
    fault: str | None = None  # TIMEOUT, ERROR or INVALID: the sample cannot be trained
    detail: str = ""  # one line about the fault, for people


@dataclass(frozen=True)
class BuiltIn:
    """A scorer that comes with Leeway."""

    compute_score: ComputeScore
    isolated: bool  # may take arbitrarily long: only in the killable process


def _task_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    return TASKS[data_source].score(solution_str, ground_truth, extra_info)


_GSM8K = BuiltIn(gsm8k.compute_score, isolated=False)
_MATHS = BuiltIn(maths.compute_score, isolated=True)
_TASK = BuiltIn(_task_score, isolated=False)


def built_in(data_source: str) -> BuiltIn | None:
    """The scorer of a data source, or None if there is none (then the user has to give a function)."""
    if data_source in TASKS:
        return _TASK
    return {"number": _GSM8K, "expression": _MATHS, None: None}[answer_kind(data_source)]
