"""Finding the answer in a text: pure, linear string work.

Used by the scorers (``generators/rewards/``) on responses and by the check of reference answers
when data are loaded, so that both sides go through the same parser. Nothing here looks at a window
of the text: neither position nor length of a response changes what is found.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Any, Literal

from common.tasks import TASKS

MAX_NUMBER_CHARS = 400  # longer digit strings are no answer to anything
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A minus is a sign only where no operand stands before it: `10-15` is no negative number.
_SIGN = r"(?:(?<![0-9A-Za-z)\]}.])-)?"
_NUMBER = re.compile(
    rf"{_SIGN}(?:\\[dt]?frac(?:\{{(?P<over>-?[0-9]+)\}}\{{(?P<under>[0-9]+)\}}|(?P<over1>[0-9])(?P<under1>[0-9]))"
    rf"|(?:{_UNSIGNED})(?:/[0-9]+)?)"
)
_BOX = re.compile(r"\\(?:boxed|fbox)[^\S\n]*")
_BRACE = re.compile(r"[{}]")
_MARKER = re.compile(r"####+[^\S\n]*\n?([^\n]*)")
_PHRASE = re.compile(r"(?i:answer)(?: is|:|\s*=)[\s*_]*([^\n]*)")
_DECORATION = " \t*_`"
_LATEX_NOISE = (
    ("-\\$", "-"),
    ("-$$", "-"),
    ("-$", "-"),
    ("\\!", ""),
    ("\\,", ""),
    ("{,}", ","),
    ("\\%", "%"),
    ("\\$", " "),
    ("\\ ", " "),
)


def clean(text: str) -> str:
    """``text`` with one kind of minus and without currency and mathematics signs and LaTeX's spacing."""
    text = text.replace("\u2212", "-").replace("\uff0d", "-")
    for noise, plain in _LATEX_NOISE:
        text = text.replace(noise, plain)
    return text.replace("$", " ")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}`` (or ``\fbox{…}``), braces balanced.

    None if there is none, or if the *last* one is never closed: an earlier box does not stand in
    for an answer that was begun and not finished.
    """
    last = _last(_BOX, text)
    if last is None:
        return None
    if text[last.end() : last.end() + 1] != "{":
        return text[last.end() : last.end() + 1].strip() or None  # "\boxed 7", as TeX reads it
    return _balanced(text, last.end())


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def has_box(text: str) -> bool:
    return _BOX.search(text) is not None


def _balanced(text: str, start: int) -> str | None:
    depth = 0
    for brace in _BRACE.finditer(text, start):
        if brace.start() and text[brace.start() - 1] == "\\":
            continue  # \{ and \} are set braces
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None


def marked(text: str) -> str | None:
    """What stands behind the last ``####`` on its line, decorations stripped; None without a marker.

    Lines that begin with a letter are headings of a Markdown text, not answers.
    """
    answer = None
    for match in _MARKER.finditer(text):
        line = match.group(1).strip(_DECORATION)
        if not line[:1].isalpha():
            answer = line
    return answer


def number(text: str) -> Fraction | None:
    """The number that ``text`` begins with: sign, commas, decimals, ``a/b``, ``\\frac{a}{b}``."""
    match = _NUMBER.match(text.strip(_DECORATION))
    return _value(match) if match else None


def only_number(text: str) -> Fraction | None:
    """The number that ``text`` is, with nothing beside it but decorations, ``%`` and a full stop."""
    match = _NUMBER.fullmatch(text.strip(_DECORATION).rstrip(_DECORATION + ".%"))
    return _value(match) if match else None


def last_number(text: str) -> Fraction | None:
    """The last number of a running text."""
    last = _last(_NUMBER, text)
    return _value(last) if last else None


def final_number(text: str) -> Fraction | None:
    r"""The numeric answer of a response: behind the last ``####``, else in the last box, else the last number.

    None is "no answer"; a marker or a box without a number in it is no answer either.
    """
    text = clean(text)
    line = marked(text)
    if line is not None:
        return _boxed_number(line) if has_box(line) else number(line)
    if has_box(text):
        return _boxed_number(text)
    return last_number(text)


def reference_number(text: str) -> Fraction | None:
    """The numeric answer of a reference: as ``final_number``, but a text without mark may hold only one number."""
    plain = clean(text)
    if marked(plain) is None and not has_box(plain) and sum(1 for _ in _NUMBER.finditer(plain)) != 1:
        return None
    return final_number(text)


def final_expression(text: str) -> str | None:
    """The mathematical answer of a response, as LaTeX: the last box, else behind the last ``####``, else behind
    the last "answer is" or "Answer:", else the last number.

    None is "no answer"; also when the last box is never closed.
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


def reference_expression(text: str) -> str | None:
    """The mathematical answer of a reference: a solution with a box or a ``####``, or the bare answer."""
    plain = clean(text)
    if has_box(plain) or marked(plain) is not None:
        return final_expression(text)
    return plain.strip() or None


# ---------------------------------------------------------------- which data sources are answered how
_NUMBERS = ("openai/gsm8k", "gsm8k")
_EXPRESSIONS = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math",
    "math_dapo",
    "math_dapo_reasoning",
)
SOURCES = (*_NUMBERS, *_EXPRESSIONS, "aime*")


def answer_kind(data_source: str) -> Literal["number", "expression"] | None:
    """How responses to this data source are answered; None: it has no built-in reward of this kind."""
    if data_source in _NUMBERS:
        return "number"
    return "expression" if data_source in _EXPRESSIONS or data_source.startswith("aime") else None


def reference_fault(data_source: str, ground_truth: Any) -> str | None:
    """Why a built-in reward cannot score against this reference and what to do, or None."""
    kind, text = answer_kind(data_source), str(ground_truth)
    if kind == "number" and reference_number(text) is None:
        return f"no single number in the reference {text[:80]!r}; write it as a number or behind `####`"
    if kind == "expression" and reference_expression(text) is None:
        return f"no answer in the reference {text[:80]!r}; write the bare answer or box it"
    return None


def scoring_fault(data_source: str, ground_truth: Any) -> tuple[str, str] | None:
    """``(short reason, sentence)`` if no built-in reward could score a response to such a row."""
    if data_source not in TASKS and answer_kind(data_source) is None:
        return "unknown_data_source", (
            f"data_source={data_source!r} has no built-in reward (there are {', '.join(sorted([*TASKS, *SOURCES]))}); "
            "give reward.custom_function.path"
        )
    fault = reference_fault(data_source, ground_truth)
    return ("bad_reference", fault) if fault else None


def _boxed_number(text: str) -> Fraction | None:
    boxed = last_boxed(text)
    return None if boxed is None else number(boxed)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match.group()) > MAX_NUMBER_CHARS:
        return None
    negative, plain = match.group().startswith("-"), match.group().removeprefix("-").replace(",", "")
    over, _, under = plain.partition("/")
    if "frac" in plain:
        over, under = match["over"] or match["over1"], match["under"] or match["under1"]
    if under and int(under) == 0:
        return None
    value = Fraction(f"0{over}" if over.startswith(".") else over) / int(under or 1)
    return -value if negative else value
