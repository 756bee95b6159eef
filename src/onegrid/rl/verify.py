"""Whether a completion answers a mathematics problem: exact for numbers, by math-verify for expressions.

The only file that knows math-verify. Its own time limits are signals, which raise outside the main thread and cannot
stop native code; they are switched off here, and a limit that holds is put around it in rl/scoring.py.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.answers import Number, final_answer, read_number, same_number, unboxed
from onegrid.rl.rewards import Verdict

ANSWER_TYPES = ("auto", "integer", "decimal", "fraction", "expression")
ALLOWED = {"integer": ("integer",), "decimal": ("integer", "decimal"), "fraction": ("integer", "decimal", "fraction")}
MAX_EXPRESSION = 1000
"""Characters; a longer answer is wrong and is not parsed."""
RELATIVE = 1e-5
"""Numbers that math-verify calls equal must also agree so far relatively: it rounds to 6 decimals, which makes all
tiny numbers equal."""


@dataclass(frozen=True, slots=True)
class Expressions:
    """Answer and label that only a computer algebra can compare; give both to `same_expression`."""

    answer: str
    label: str


def verify_math(completion: str, label: object, *, answer_type: str = "auto") -> Verdict:
    """1 if the completion's final answer equals the label, 0 if not, None if the label is unusable. No time limit.

    completion   free text; its answer is found by `final_answer`, or is all of it if it is one line without a mark
    label        text or a number; boxes, dollar signs and a solution that ends in `#### x` are opened
    answer_type  "integer", "decimal", "fraction": exact values, each type including those before it, and anything else
                 in the answer is wrong; "expression": by math-verify; "auto": exact where both are numbers, otherwise
                 by math-verify

    Works in any thread or process. Raises TaskError without math-verify where an expression needs it (extra
    `rewards`), ConfigError for an unknown type.
    """
    found = compare_numbers(completion, label, answer_type=answer_type)
    return found if isinstance(found, Verdict) else same_expression(found)


def compare_numbers(completion: str, label: object, *, answer_type: str = "auto") -> Verdict | Expressions:
    """The part of `verify_math` that takes microseconds, or what remains to be compared."""
    if answer_type not in ANSWER_TYPES:
        raise ConfigError(f'answer_type is "{answer_type}"; allowed are {", ".join(ANSWER_TYPES)}')
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return Verdict(reward=None, reason=f"the label {label!r} is a {type(label).__name__}, not text or a number")
    if isinstance(label, float) and not math.isfinite(label):
        return Verdict(reward=None, reason=f"the label is {label}, which is no number")
    wanted = str(label)
    wanted = unboxed(final_answer(wanted) or wanted)
    if not wanted:
        return Verdict(reward=None, reason=f"the label {label!r} is empty")
    right = read_number(wanted)
    if answer_type in ALLOWED and (right is None or right.kind not in ALLOWED[answer_type]):
        return Verdict(reward=None, reason=f"the label {label!r} is not of type {answer_type}")
    answer = _answer(completion)
    if answer is None or len(answer) > MAX_EXPRESSION:
        return Verdict(reward=0.0)
    given = _number(answer, wanted)
    if answer_type in ALLOWED:
        allowed = given is not None and given.kind in ALLOWED[answer_type]
        return Verdict(reward=float(allowed and same_number(_known(given), _known(right))))
    if answer_type == "auto" and given is not None and right is not None:
        return Verdict(reward=float(same_number(given, right)))
    if _plain(answer) == _plain(wanted):
        return Verdict(reward=1.0)
    return Expressions(answer, wanted)


def same_expression(found: Expressions) -> Verdict:
    """Whether math-verify proves both equal. Can take for ever, so that only a process that can be killed should ask.

    math-verify 0.9.0 calls 1/2004! and 1/2006! equal; numbers must therefore agree relatively as well. That is asked
    first: two numbers that differ are told apart in a millisecond, and take simplification twenty or more.
    """
    parse, verify = _library()
    gold = _parsed(found.label)
    if not gold:
        return Verdict(reward=None, reason=f"math-verify cannot read the label {found.label!r}")
    given = parse(f"${found.answer}$", parsing_timeout=None)
    equal = bool(given) and _agree(gold[0], given[0]) and bool(verify(gold, given, timeout_seconds=None))
    return Verdict(reward=float(equal))


@lru_cache(maxsize=1024)
def _parsed(label: str) -> list[Any]:
    """A label as math-verify reads it: the answers of one group share it."""
    parse, _ = _library()
    return list(parse(f"${label}$", parsing_timeout=None))


def warm_up() -> None:
    """Load math-verify and its grammar, so that the first answer does not pay for it."""
    same_expression(Expressions("x+1", "1+x"))


def _library() -> tuple[Any, Any]:
    try:
        import math_verify
    except ImportError as error:
        raise TaskError(
            'comparing expressions needs math-verify, which is not installed: pip install "onegrid[rewards]", '
            f"or set the answer type to integer, decimal or fraction ({error})"
        ) from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns, at every call, that its time limit is off
    return math_verify.parse, math_verify.verify


def _answer(completion: str) -> str | None:
    marked = final_answer(completion)
    if marked is not None:
        return unboxed(marked)
    whole = completion.strip()
    return unboxed(whole) if whole and "\n" not in whole else None


def _number(answer: str, label: str) -> Number | None:
    """The number of an answer; of "x = 5", where the label has no such sign, the part behind it."""
    right_side = answer.rpartition("=")[2] if "=" not in label else answer
    return read_number(right_side)


def _agree(one: Any, other: Any) -> bool:
    import sympy

    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (one, other)):
        return True
    if one == 0 or other == 0:
        return bool(one == other)
    ratio = complex(sympy.N(one / other, 15))
    return abs(ratio - 1.0) <= RELATIVE


def _plain(text: str) -> str:
    return "".join(text.split()).removesuffix(".")


def _known(number: Number | None) -> Number:
    assert number is not None
    return number
