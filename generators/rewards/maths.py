r"""Mathematical answers: the last ``\boxed{…}`` of the response against the reference, 1 or 0.

Compared as exact numbers, else as normalised LaTeX, else (extra `maths`) by math-verify, which may
take arbitrarily long and is therefore called in the killable reward process only. Its own time
limits use signals, fail off the main thread, and are switched off.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import Any

from common.answers import final_expression, only_number, reference_expression

_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\left|\\right|\\displaystyle|\\;|\\:|\^\\circ|\^\{\\circ\}|[\s~]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the final answer of the response equals the reference, else 0.0."""
    answer = final_expression(solution_str)
    reference = reference_expression(str(ground_truth))
    if answer is None or reference is None:
        return 0.0
    return float(equal(answer, reference))


def prepare() -> None:
    """Imports that take seconds, before the clock of the first call runs."""
    if importlib.util.find_spec("math_verify"):
        importlib.import_module("math_verify")


def equal(answer: str, reference: str) -> bool:
    a, b = only_number(answer), only_number(reference)
    if a is not None and b is not None:
        return a == b
    if normalised(answer) == normalised(reference):
        return True
    return _symbolically_equal(answer, reference)


def normalised(latex: str) -> str:
    """LaTeX without spacing, sizing and text commands, so that equal writings become equal strings."""
    latex = _TEXT.sub(r"\1", latex)
    latex = re.sub(r"\\[dt]frac", r"\\frac", latex)
    return _NOISE.sub("", latex).rstrip(".").lower()


def _symbolically_equal(answer: str, reference: str) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    for module in ("parser", "grader"):  # they warn, at each call, that their time limits are off
        logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)
    gold = parse(f"${reference}$", parsing_timeout=None)
    said = parse(f"${answer}$", parsing_timeout=None)
    return bool(gold and said and verify(gold, said, timeout_seconds=None))
