"""The reward of configs/smollm2.yaml: the last number of the response, judged by `reasoning-gym`."""

import re

from reasoning_gym import get_score_answer_fn


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right answer, 0.01 for another number, 0 for none."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str.replace(",", ""))
    if not numbers:
        return 0.0
    judge = get_score_answer_fn(data_source.removeprefix("reasoning_gym/"))
    return float(judge(numbers[-1], {"answer": ground_truth, "metadata": {}}))
