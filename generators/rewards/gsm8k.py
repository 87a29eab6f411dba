"""GSM8K: the final number of the response against that of the reference, 1 or 0.

The answer is what stands behind the last ``####``, else in the last box, else the last number of
the text (see ``common/answers.py``). Signs, thousands separators, ``$`` and Markdown stars do not
change a number; `no answer` equals nothing.
"""

from __future__ import annotations

from typing import Any

from common.answers import final_number, reference_number


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the response (and only the response is looked at) ends in the right number, else 0.0."""
    answer = final_number(solution_str)
    return float(answer is not None and answer == reference_number(str(ground_truth)))
