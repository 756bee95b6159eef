"""The answer in a completion, and numbers as exact values: what can be judged without a computer algebra.

Everything here is exact and takes microseconds. Free of torch, so that a scoring process starts fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
HASHES = re.compile(r"####[ \t]*([^\n]*)")
ANSWER = re.compile(r"(?:^|\n)[ \t*]*(?:the )?(?:final )?answer(?: is)?[ \t*]*:[ \t*]*([^\n]*)", re.IGNORECASE)

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SPACES = re.compile(r"\\[!,;: ]|~|\\quad")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\\[,;:]|~|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
"""A narrow space inside a number, as in 10\\,000, or the 10,\\!000 of the MATH data set."""
_UNIT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_CURRENCY = "$€£¥"
_NUMERAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"([+-]?)\s*({_NUMERAL})")
_RATIO = re.compile(rf"([+-]?)\s*({_NUMERAL})\s*/\s*([+-]?)\s*({_NUMERAL})")
_LATEX_RATIO = re.compile(r"([+-]?)\s*\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_WORD = r"(?:(?!pi\b)[^\W\d_]{2,}|[mgslhkjwvcfMGSLHKJWVCFN])\.?(?:\^\{?-?[1-9]\}?|[²³])?"
_UNIT = re.compile(rf"{_WORD}(?:[ /*·-]+{_WORD}){{0,4}}|%|°[CF]?|")
MAX_UNIT = 60
"""Characters."""
MAX_DIGITS = 4000
"""A longer numeral is not read: its value could take quadratic time."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value with the unit that was written beside it."""

    value: Fraction
    kind: str
    """"integer", "decimal" or "fraction": how it was written. 18.00 is an integer."""
    unit: str = ""
    """Lower case without spaces; empty if there was none. Per cent is a unit: 28% is 28 with the unit %."""


def final_answer(completion: str) -> str | None:
    """The answer that a completion commits to, or None if it marks none.

    The last balanced \\boxed{...} or the last `#### ...`, whichever stands later; otherwise what follows the last
    `Answer:`. A box that is never closed is no answer. Boxes inside the answer are opened, so that a box around a box
    is its content.
    """
    box = _last_box(completion)
    hashes = _last(HASHES, completion)
    if hashes and (box is None or hashes.start() > box[0]):
        return unboxed(hashes.group(1))
    if box is not None:
        return unboxed(box[1])
    line = _last(ANSWER, completion)
    return line.group(1).strip() if line else None


def unboxed(text: str) -> str:
    """The text without boxes, `####` and mathematics signs that stand around all of it, up to eight layers."""
    for _ in range(8):
        before, text = text, text.strip().rstrip("*").strip()
        hashes = text.rpartition("####")
        if hashes[1]:
            text = hashes[2].strip()
        match = BOX.match(text)
        if match and _closing(text, match.end()) == len(text) - 1:
            text = text[match.end() : -1]
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = text if closing in inner else inner
        if text == before:
            break
    return text


def read_number(text: str) -> Number | None:
    """The number that a text is, with at most a unit or a currency beside it; None if it is anything else.

    Reads integers, decimals, thousands separators between groups of three digits ("1,000", "1\\,000"), a/b and
    \\frac{a}{b}, signs and leading zeros. Exact: nothing is rounded. Two numbers, words before a number, powers and
    formulas are not read.
    """
    text = unboxed(text).replace("−", "-").replace("{,}", ",").replace(r"\%", "%").replace(r"\$", "$")
    if len(text) > MAX_DIGITS:
        return None
    text = _SPACES.sub(" ", _grouped(text))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text)
    text = _UNIT_COMMAND.sub(r" \1 ", text).strip().rstrip(".").strip()
    sign, text = ("-", text[1:].strip()) if text[:1] == "-" and text[1:].strip()[:1] in tuple(_CURRENCY) else ("", text)
    unit = ""
    if text[:1] and text[:1] in _CURRENCY:
        unit, text = text[0], text[1:].strip()
    found = _ratio(text) or _plain(text)
    if found is None:
        return None
    value, kind, rest = found
    rest = rest.strip()
    if len(rest) > MAX_UNIT or not _UNIT.fullmatch(rest) or (rest and unit):
        return None
    unit = unit or re.sub(r"[\s.]", "", rest.lower())
    return Number(-value if sign else value, kind, unit)


def same_number(answer: Number, label: Number) -> bool:
    """Equal values; a unit counts only where both have one. Singular and plural are one unit."""
    units = (answer.unit.removesuffix("s"), label.unit.removesuffix("s"))
    return answer.value == label.value and (units[0] == units[1] or "" in units)


def _grouped(text: str) -> str:
    """Narrow spaces between groups of three digits as commas, unless a first group has more than three itself."""
    with_commas = _THOUSANDS.sub(",", text)
    return text if re.search(r"[0-9]{4},[0-9]{3}(?![0-9])", with_commas) else with_commas


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found


def _last_box(text: str) -> tuple[int, str] | None:
    """Start and content of the balanced box that closes last. One pass, whatever the text."""
    found: tuple[int, str] | None = None
    opened: list[tuple[bool, int, int]] = []
    for brace in BRACE.finditer(text):
        if brace.group() == "}" and opened:
            is_box, start, inside = opened.pop()
            found = (start, text[inside : brace.start()]) if is_box else found
        elif brace.group().endswith("{") and brace.group() != r"\{":
            opened.append((brace.group() != "{", brace.start(), brace.end()))
    return found


def _closing(text: str, start: int) -> int | None:
    """Position of the brace that closes the one before `start`. An escaped brace is a character."""
    depth = 1
    for brace in BRACE.finditer(text, start):
        if brace.group() == "}":
            depth -= 1
        elif brace.group().endswith("{") and brace.group() != r"\{":
            depth += 1
        if depth == 0:
            return brace.start()
    return None


def _plain(text: str) -> tuple[Fraction, str, str] | None:
    match = _NUMBER.match(text)
    if not match:
        return None
    value = _value(match.group(2)) * (-1 if match.group(1) == "-" else 1)
    return value, "integer" if value.denominator == 1 else "decimal", text[match.end() :]


def _ratio(text: str) -> tuple[Fraction, str, str] | None:
    if match := _LATEX_RATIO.match(text):
        parts = [_plain((match.group(i) or match.group(i + 1)).strip()) for i in (2, 4)]
        if any(part is None or part[2].strip() for part in parts):
            return None
        above, below = (part[0] for part in parts if part)
        sign = match.group(1)
    elif match := _RATIO.match(text):
        above, below = _value(match.group(2)), _value(match.group(4))
        below = -below if match.group(3) == "-" else below
        sign = match.group(1)
    else:
        return None
    if below == 0:
        return None
    return above / below * (-1 if sign == "-" else 1), "fraction", text[match.end() :]


def _value(numeral: str) -> Fraction:
    whole, _, decimals = numeral.replace(",", "").partition(".")
    return Fraction(int((whole or "0") + decimals), 10 ** len(decimals))
