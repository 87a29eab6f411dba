"""Reward parsing: kinds of public fault reports, as values."""

import time
from fractions import Fraction

import pytest

from common.answers import final_number, last_boxed, reference_fault, reference_number
from generators.rewards import built_in, gsm8k, maths

MINUS = "\u2212"


def gsm(response: str, truth: str) -> float:
    return gsm8k.compute_score("openai/gsm8k", response, truth, None)


def test_neither_position_nor_length_of_the_response_matters():
    assert gsm("#### 42\n" + "x" * 301, "42") == 1.0
    assert gsm("#### 42\n" + "blah " * 100_000, "42") == 1.0
    assert gsm("7 8 9 " * 100_000 + "#### 42", "42") == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [("#### -5", 1), ("#### 5", 0), (r"#### \boxed{-5}", 1), ("#### $-5", 1), ("#### -$5", 1), (f"#### {MINUS}5", 1)],
)
def test_the_sign_counts_however_it_is_written(response, score):
    assert gsm(response, "-5") == score
    assert gsm(response, f"{MINUS}5") == score


@pytest.mark.parametrize(
    ("response", "truth"), [("The total is $29.00.", "29"), ("#### 42.", "42"), ("#### $1,234", "1234")]
)
def test_currency_commas_and_a_final_dot_do_not_change_a_number(response, truth):
    assert gsm(response, truth) == 1.0


def test_punctuation_is_no_answer():
    assert gsm("The total is 72 clips, altogether.", "72") == 1.0
    assert final_number("#### ,") is None
    assert gsm("#### ,", "") == gsm("#### ,", ",") == 0.0  # "no answer" equals nothing, not even another


def test_references_go_through_the_same_parser():
    reference = "She has 10 - 4 = 6 apples, and owes 9.\n#### -3"
    assert reference_number(reference) == -3
    assert gsm("#### -3", reference) == 1.0 and gsm("#### 3", reference) == 0.0
    assert reference_fault("openai/gsm8k", reference) is None and reference_fault("openai/gsm8k", -3) is None
    assert "'three'" in (reference_fault("openai/gsm8k", "three") or "")
    assert reference_fault("openai/gsm8k", "5 or 6") is not None
    assert reference_fault("math", r"\boxed{7} so \boxed{") is not None
    assert reference_fault("math", "x+1") is None and reference_fault("acme/own", "") is None


@pytest.mark.parametrize("compute_score", [gsm8k.compute_score, maths.compute_score])
def test_braces_of_a_box_are_balanced(compute_score):
    assert compute_score("", r"\boxed{\frac{1}{2}}", "1/2", None) == 1.0
    assert compute_score("", r"\boxed{\frac{1}{3}}", "1/2", None) == 0.0
    assert last_boxed(r"\boxed{\{1, \frac{a}{b}\}} and more}") == r"\{1, \frac{a}{b}\}"


@pytest.mark.parametrize("compute_score", [gsm8k.compute_score, maths.compute_score])
def test_an_unfinished_last_box_is_no_answer(compute_score):
    assert compute_score("", r"\boxed{7} wait… \boxed{", "7", None) == 0.0
    assert compute_score("", r"\boxed{7} wait… \boxed{7", "7", None) == 0.0
    assert compute_score("", r"\boxed{8} wait… \boxed{7}", "7", None) == 1.0


@pytest.mark.parametrize("compute_score", [gsm8k.compute_score, maths.compute_score])
def test_markdown_stars_are_not_part_of_the_number(compute_score):
    for response in ("Final Answer: **73**", "#### **73**", "**#### 73**", "**Answer:** 73."):
        assert compute_score("", response, "73", None) == 1.0


def test_an_empty_response_scores_nothing():
    assert gsm("", "5") == 0.0
    assert maths.compute_score("math", "", "5", None) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 42\n#### Conclusion\nsee 7 above", 42),  # a heading is no answer
        ("####\n42", 42),
        ("between 10-15 apples", 15),  # no sign after an operand
        ("10 - 5 = 5", 5),
        (r"\boxed{1{,}234}", 1234),
        (r"\boxed{\$1,234.50}", Fraction("1234.5")),
        (r"so $-\frac{3}{4}$", Fraction(-3, 4)),
        ("1,2,3", 3),
        ("1/0", None),
        ("9" * 5000, None),  # not even converted
    ],
)
def test_final_number(text, value):
    assert final_number(text) == value


@pytest.mark.parametrize("unit", ["9,", "#### \n", r"\boxed{", "{", "-", "9/", r"\frac{9", "1,111", ".1", "####"])
def test_work_is_linear_in_the_response(unit):
    def seconds(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        start = time.perf_counter()
        final_number(text)
        return time.perf_counter() - start

    assert seconds(400_000) < 2.0  # quadratic work would take minutes


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{0.5}", r"\frac12", 1),
        (r"\boxed{\text{Blue}}", "blue", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{1,000,000}", "1000000", 1),
        ("so x = 5", "5", 1),
        (r"the answer is $\dfrac{2}{3}$.", r"\frac{2}{3}", 1),
        (r"\boxed{(1, 2]}", "(1,2]", 1),
        (r"\boxed{(1, 2]}", "(1,3]", 0),
    ],
)
def test_maths_answers(response, truth, score):
    assert maths.compute_score("math", response, truth, None) == score


def test_symbolic_equality_with_math_verify():
    pytest.importorskip("math_verify")  # an extra
    assert maths.compute_score("math", r"\boxed{x^2+2x+1}", "(x+1)^2", None) == 1.0
    assert maths.compute_score("math", r"\boxed{x^2+2x+2}", "(x+1)^2", None) == 0.0


def test_the_data_source_chooses_the_scorer():
    toy = built_in("reverse_digits")
    assert toy is not None
    assert toy.compute_score("reverse_digits", "31284", "31284", None) == 1.0
    assert toy.compute_score("reverse_digits", "31248", "31284", None) == 0.0
    assert built_in("aime2024") is built_in("lighteval/MATH")
    assert built_in("openai/gsm8k") is built_in("gsm8k")
    assert built_in("nobody/knows") is None
