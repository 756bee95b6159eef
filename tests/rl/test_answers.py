"""Answers in completions, and numbers as exact values."""

from __future__ import annotations

from fractions import Fraction

import pytest

from onegrid.rl.answers import final_answer, read_number, same_number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and \boxed{6", "5"),  # the last one that is closed
        (r"\boxed{ never closed, with \boxed{5} in it", "5"),
        (r"\boxed{never", None),
        (r"\boxed{\boxed{5}}", "5"),
        ("so 4 + 1 = 5\n#### 5", "5"),
        ("#### 1,000\n", "1,000"),
        ("#### 5\nno: \\boxed{6}", "6"),  # whichever stands later
        ("\\boxed{6}\n#### 5", "5"),
        ("Answer: 5\nAnswer: 6", "6"),
        ("**Answer:** 7", "7"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_one_that_is_marked_and_whole(completion, answer):
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "value", "kind", "unit"),
    [
        ("5", 5, "integer", ""),
        ("-5", -5, "integer", ""),
        ("−5", -5, "integer", ""),
        ("+5", 5, "integer", ""),
        ("016", 16, "integer", ""),
        ("1,000", 1000, "integer", ""),
        (r"10\,000", 10000, "integer", ""),
        (r"1,\!234,\!567", 1234567, "integer", ""),
        ("-1\u202f000", -1000, "integer", ""),
        ("1{,}000", 1000, "integer", ""),
        (r"1\,000.5 \text{ km}", Fraction(2001, 2), "decimal", "km"),
        ("12,345.50", Fraction(24691, 2), "decimal", ""),
        ("18.00", 18, "integer", ""),
        (".5", Fraction(1, 2), "decimal", ""),
        ("-1/3", Fraction(-1, 3), "fraction", ""),
        (r"-\dfrac{1}{3}", Fraction(-1, 3), "fraction", ""),
        (r"\frac12", Fraction(1, 2), "fraction", ""),
        ("$5", 5, "integer", "$"),
        ("-$1,200", -1200, "integer", "$"),
        (r"\$40", 40, "integer", "$"),
        ("5 dollars", 5, "integer", "dollars"),
        (r"5\text{ cm}", 5, "integer", "cm"),
        ("5 km/h", 5, "integer", "km/h"),
        ("28%", 28, "integer", "%"),
        (r"30^\circ", 30, "integer", "°"),
        (r"$\boxed{5}$", 5, "integer", ""),
        ("5.", 5, "integer", ""),
    ],
)
def test_numbers_are_read_exactly(text, value, kind, unit):
    found = read_number(text)
    assert found is not None and (found.value, found.kind, found.unit) == (value, kind, unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "two",
        "3 4",
        "1,00",
        r"12\,5",
        r"1,\,234",
        r"1234\,567",
        "1.000,5",
        "1/0",
        "2^{10}",
        "pm2021",
        "5x",
        "5pi",
        "1e3",
        "5 apples and 3",
        "12:30",
        "9" * 5000,
    ],
)
def test_what_is_not_a_number_is_not_read(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        ("5 km", "5", True),
        ("5", "5 km", True),
        ("5 km", "5 m", False),
        ("5 apple", "5 apples", True),
        ("28%", "28", True),
    ],
)
def test_units_count_where_both_have_one(answer, label, equal):
    assert same_number(read_number(answer), read_number(label)) is equal


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 20_000, r"\boxed{" * 5_000 + "1" + "}" * 5_000, "#" * 50_000, "* " * 25_000]
)
def test_hostile_completions_take_one_pass(text):
    answer = final_answer(text)  # quadratic, these would take minutes
    assert answer is None or len(answer) < len(text)
