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

from common.answers import clean, has_box, last_boxed, last_number, marked, only_number

_PHRASE = re.compile(r"(?i:answer)(?: is|:|\s*=)[\s*_]*([^\n]*)")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\left|\\right|\\displaystyle|\\;|\\:|\^\\circ|\^\{\\circ\}|[\s~]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the final answer of the response equals the reference, else 0.0."""
    answer = final_answer(solution_str)
    reference = reference_answer(str(ground_truth))
    if answer is None or reference is None:
        return 0.0
    return float(equal(answer, reference))


def prepare() -> None:
    """Imports that take seconds, before the clock of the first call runs."""
    if importlib.util.find_spec("math_verify"):
        importlib.import_module("math_verify")


def final_answer(text: str) -> str | None:
    """The last box, else behind the last ``####``, else behind the last "answer is" or "Answer:", else the last number.

    None is "no answer": also when the last box is never closed.
    """
    text = clean(text)
    if has_box(text):
        return last_boxed(text)
    line = marked(text)
    if line is None:
        phrases = _PHRASE.findall(text)
        line = phrases[-1] if phrases else None
    if line is not None and line.strip(" *_`."):
        return line.strip(" *_`").rstrip(".")
    value = last_number(text)
    return None if value is None else str(value)


def reference_answer(text: str) -> str | None:
    """A reference is a solution with a box or a ``####``, or the bare answer."""
    plain = clean(text)
    if has_box(plain) or marked(plain) is not None:
        return final_answer(text)
    return plain.strip() or None


def reference_fault(ground_truth: Any) -> str | None:
    """Why a reference cannot be scored against, or None."""
    if reference_answer(str(ground_truth)) is None:
        return f"no answer in the reference {str(ground_truth)[:80]!r}; write the bare answer or box it"
    return None


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
