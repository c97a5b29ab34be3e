"""Reward of the gsm8k recipe: 1 when the response's final number equals the ground truth, however it is dressed.

verl calls `compute_score` for each response and logs the mean of every key in validation. `strict` is verl's own GSM8K
score, reported beside ours: it gives 0 to many right answers (`\\boxed{18}`, `#### $18`, an answer with more than 300
characters after it), so a reward made of it teaches a format first, and its gain need not be a gain in arithmetic.

Which number is the final answer, in order of preference:
1. the last marker: `#### 18` or `\\boxed{18}`, whichever comes later (a heading such as `#### 1. Add up` is no marker);
2. the last "answer is 18", "Answer: 18", "answer = 18", or "answer" alone on the line before the number;
3. the last number of the text.
With a closed `<think>` block, only what follows it counts. In `#### 3 * 6 = 18` the number after the last `=` counts.

Dress that does not matter: `$ € £ ¥ %`, commas and thin spaces between thousands, a trailing dot, bold, code, LaTeX
spacing and \\text, signs from Unicode, units. Numbers are compared exactly, as fractions: 18 = 18.00 = \\frac{36}{2}.
"1.5 million" equals 1500000 and also 1.5, since the question may have asked "how many million".

Not covered: number words ("eighteen"), powers of ten, arithmetic without its result (`#### 3 * 6`), clock times,
decimal commas. Nothing is evaluated, every pattern is bounded, and time is linear in the length of the response.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Any

from verl.utils.reward_score import gsm8k as verl_gsm8k

# How far after a marker its number may stand, and how many markers are tried from the end: both bound the time.
REGION_CHARS = 200
MAX_MARKERS = 50

# ---- undress: one pass over the whole text per rule, so each stays readable ----

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "‐": "-", "‑": "-", "—": " ", "…": " ", "×": "*", "⋅": "*", "·": "*", "÷": "/", "⁄": "/"}
    | {
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u200b": None,
        "½": " 1/2",
        "¼": " 1/4",
        "¾": " 3/4",
        "＝": "=",
        "＄": "$",
        "％": "%",
        "，": ",",
    }
)
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", ","),  # 1 234 with a thin space
        (r"(?<=\d)(?:\{,\}|\\,)(?=\d{3}(?!\d))", ","),  # 1{,}234 and 1\,234
        (r"\\!", ""),
        (r"\\[,;:> ]", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|bm|boldsymbol)\b", " "),
        (r"\\(?:left|right|displaystyle|quad|qquad|approx|big|Big)\b|\\[()\[\]]", " "),
        (r"\\(?:times|cdot|ast)\b", "*"),
        (r"\\div\b", "/"),
        (r"(?<=\d)\s?\\[dtc]?frac", r" \\frac"),  # 1\frac{1}{2} is one and a half
        (r"\\[dtc]?frac\s?\{\s?(\d{1,30})\s?\}\s?\{\s?(\d{1,30})\s?\}", r"\1/\2"),
        (r"\\[dtc]?frac\s?(\d)\s?(\d)", r"\1/\2"),
        (r"\*\*|__|`", ""),
        (r"\.{2,}", " "),
        (r"(?<=\d)\s?[xX]\s?(?=\$?\d)", "*"),  # 3 x 6
    )
]


def undress(text: str) -> str:
    # The first rule needs the spaces that the translation makes plain.
    text = _RULES[0][0].sub(_RULES[0][1], text).translate(_CHARACTERS)
    for pattern, replacement in _RULES[1:]:
        text = pattern.sub(replacement, text)
    return text


# ---- one number ----

# Every repetition has a bound: a run of digits longer than 30 is noise, and int() of a megabyte of digits is an error.
_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9.])(?<![A-Za-z]_)                            # not inside a word, a name or another number
    (?P<sign>[-+]?) (?:[$€£¥][ ]?)? (?P<sign_after>-?)         # "- 18" is a list item, "-18" and "-$18" are negative
    (?:
        (?P<mixed>\d{1,30}) [ ] (?P<part>\d{1,30}) / (?P<parts>\d{1,30})                            # 1 1/2
      | (?P<whole>\d{1,3}(?:,\d{3}){1,9}(?!\d) | \d{1,30}) (?P<decimals>\.\d{1,30})?
      | (?P<only_decimals>\.\d{1,30})
    )
    (?!\.?\d)
    (?: [ ]? / [ ]? (?P<divisor>\d{1,30}(?:\.\d{1,30})?) (?!\.?\d) )?
    (?: [ ]? (?P<scale>thousand|million|billion)\b )?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALE = {"thousand": 10**3, "million": 10**6, "billion": 10**9}


def readings(match: re.Match[str]) -> set[Fraction]:
    """What a matched number may mean; empty for a division by zero."""
    if match["mixed"]:
        parts = Fraction(match["parts"])
        value = Fraction(match["mixed"]) + Fraction(match["part"]) / parts if parts else None
    else:
        value = Fraction((match["whole"] or "0").replace(",", "") + (match["decimals"] or match["only_decimals"] or ""))
    if value is not None and match["divisor"]:
        divisor = Fraction(match["divisor"])
        value = value / divisor if divisor else None
    if value is None:
        return set()
    if "-" in (match["sign"], match["sign_after"]):
        value = -value
    scale = match["scale"]
    return {value, value * _SCALE[scale.lower()]} if scale else {value}


# A word may stand in an equation only before an operator: `3 apples * 6 = 18`, but not `18 because cost = 2`.
_EQUATION = re.compile(r"(?:[-+*/^().,$€£¥%\s\d{}]|(?<![A-Za-z])[A-Za-z]{1,20}(?=\s{0,2}[-+*/=]))*=")


def first_number(region: str) -> re.Match[str] | None:
    """The first number, or, when it begins an equation such as `3 * 6 = 18`, the number after its last `=`."""
    match = _NUMBER.search(region)
    while match and (equation := _EQUATION.match(region, match.start())):
        after = _NUMBER.search(region, equation.end())
        if after is None:
            break
        match = after
    return match


# ---- the final answer ----

_MARKER = re.compile(r"####|\\(?:boxed|fbox)\s?\{")
_HEADING = re.compile(r"[\s#]*\d{1,4}[.):]\s+[A-Za-z]")
_DIRECT = re.compile(  # what may stand between a marker and its number
    r"(?:[^\w]|_|\b(?:the|a|an|final|answer|total|result|is|was|be|will|would|are|equals?|to|of|about|approximately|exactly|"
    r"only|just|thus|therefore|so|then|[a-z](?=\s{0,2}=))\b)*",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"\banswers?\b(?:[^\n]{0,60}?(?:\b(?:is|are|was|be|equals?)\b|[:=])|[^\w\n]{0,10}\n)", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")


def _marked(text: str) -> re.Match[str] | None:
    """The number of the last marker that has one."""
    for marker in reversed(_last(_MARKER, text)):
        region = text[marker.end() : marker.end() + REGION_CHARS]
        if marker[0] == "####":
            region = region.lstrip(" #\n").split("\n", 1)[0]
            if _HEADING.match(region):
                continue
            number = first_number(region)
            before = _NUMBER.search(region)
            if number and before and _DIRECT.fullmatch(region, 0, before.start()):
                return number
        elif number := first_number(_braced(region)):
            return number
    return None


def _braced(region: str) -> str:
    """The text up to the brace that closes the one before `region`; nothing when it is not closed."""
    depth = 1
    for i, character in enumerate(region):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return region[:i]
    return ""


def _announced(text: str) -> re.Match[str] | None:
    """The number of the last "answer is" that has one: right after it, or else the last one of its sentence."""
    for answer in reversed(_last(_ANSWER, text)):
        region = text[answer.end() : answer.end() + REGION_CHARS].lstrip("\n *:=")
        number = first_number(region)
        before = _NUMBER.search(region)
        if number and before and _DIRECT.fullmatch(region, 0, before.start()):
            return number
        end = _SENTENCE_END.search(region)
        numbers = list(_NUMBER.finditer(region, 0, end.start() if end else len(region)))
        if numbers:
            return numbers[-1]
    return None


def _last(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return list(deque(pattern.finditer(text), maxlen=MAX_MARKERS))


def final_answer(text: str) -> set[Fraction]:
    """The possible values of the final answer; empty when there is no number."""
    text = undress(text.rpartition("</think>")[2])
    number = _marked(text) or _announced(text)
    if number is None:
        numbers = _last(_NUMBER, text)
        number = numbers[-1] if numbers else None
    return readings(number) if number else set()


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; the keys are the same for every response, which verl relies on.

    Raises:
        ValueError: the ground truth is not a number, which is a fault of the data and not of the model.
    """
    truth = _NUMBER.fullmatch(undress(ground_truth).strip().rstrip(" %."))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} of a {data_source} row is not a number")
    # EDIT: the rule. `score` trains; `acc` is what is reported as accuracy; every other key is only reported.
    right = float(bool(readings(truth) & final_answer(solution_str)))
    strict = float(verl_gsm8k.compute_score(solution_str, ground_truth, method="strict"))
    return {"score": right, "acc": right, "strict": strict}
