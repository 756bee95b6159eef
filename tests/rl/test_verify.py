"""Mathematics: right values whatever the spelling, and the faults of others that must not come back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from onegrid.errors import ConfigError
from onegrid.rl.verify import ANSWER_TYPES, verify_math


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def in_a_loop(function):
    async def run():
        return await asyncio.to_thread(function)

    return asyncio.run(run())


@pytest.mark.parametrize("call", [lambda f: f(), in_a_thread, in_a_loop], ids=["main", "thread", "asyncio"])
@pytest.mark.parametrize("answer_type", ["auto", "fraction", "expression"])
def test_case_V1_a_verdict_does_not_depend_on_the_thread(call, answer_type):
    verdict = call(lambda: verify_math(r"\boxed{\frac{1}{3}}", "1/3", answer_type=answer_type))
    assert verdict.reward == 1.0


@pytest.mark.parametrize("answer_type", ANSWER_TYPES)
@pytest.mark.parametrize("label", ["5", 5, r"\boxed{5}", "$5$", "2 + 3 = 5\n#### 5"])
@pytest.mark.parametrize(
    "completion", [r"Answer: \boxed{5}", r"\boxed{5}", "5", "Answer: 5", "thus\n#### 5", r"\boxed{x = 5}"]
)
def test_case_V4_box_or_not_text_or_int_is_the_same_answer(completion, label, answer_type):
    assert verify_math(completion, label, answer_type=answer_type).reward == 1.0
    assert verify_math(completion, "6", answer_type=answer_type).reward == 0.0


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("1/2004!", "1/2006!", 0.0),  # math-verify 0.9.0 calls these three equal
        ("1/2^{99}", "1/2^{98}", 0.0),
        ("3*x-1*y+13=0", "3x + 4y + 14=0", 0.0),
        ("28%", "28", 1.0),
        ("1,000", "1000", 1.0),
        ("016", "16", 1.0),
        ("pm2021", "2021", 0.0),
        (r"\frac{1}{2004!}", r"\frac{1}{2004!}", 1.0),
        ("x+1", "1+x", 1.0),
        ("2^{10}", "1024", 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("[0,1]", "(0,1)", 0.0),
        ("-3.50", "-3.5", 1.0),
        ("0", "0.000000001", 0.0),
        ("-5", "5", 0.0),
        (r"\frac{1}{-2}", "-1/2", 1.0),
        ("- 5", "-5", 1.0),
        (r"10\,000", "10000", 1.0),
        ("10,00", "1000", 0.0),
        ("1.000", "1000", 0.0),
        ("0.3333333", "1/3", 0.0),
        ("9999999999999999", "10000000000000000", 0.0),
        (r"5\text{ cm}", "5 mm", 0.0),
        (r"5\text{ cm}", "5", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("(1,2)", "(2,1)", 0.0),
    ],
)
def test_case_V5_equality_is_that_of_values(answer, label, right):
    assert verify_math(rf"\boxed{{{answer}}}", label).reward == right


@pytest.mark.parametrize(
    ("answer_type", "completion", "reward"),
    [
        ("integer", r"\boxed{12.0}", 1.0),
        ("integer", r"\boxed{24/2}", 0.0),
        ("integer", r"\boxed{2^2 \cdot 3}", 0.0),
        ("decimal", r"\boxed{12.00}", 1.0),
        ("fraction", r"\boxed{\frac{24}{2}}", 1.0),
        ("expression", r"\boxed{2^2 \cdot 3}", 1.0),
        ("auto", r"\boxed{2^2 \cdot 3}", 1.0),
    ],
)
def test_an_answer_must_be_of_the_type_of_the_data(answer_type, completion, reward):
    assert verify_math(completion, "12", answer_type=answer_type).reward == reward


@pytest.mark.parametrize("label", [None, True, "", [5], {"a": 1}, float("nan"), float("inf")])
def test_case_V7_a_label_that_says_nothing_is_unscorable_and_not_wrong(label):
    verdict = verify_math("5", label)
    assert verdict.reward is None and "label" in verdict.reason


def test_case_V7_a_label_of_another_type_is_unscorable():
    assert verify_math("5", "one half", answer_type="integer").reward is None
    assert verify_math("5", "1/2", answer_type="decimal").reward is None


@pytest.mark.parametrize("completion", ["", "no idea\nat all", r"\boxed{5", "5" * 2000])
def test_no_answer_is_wrong(completion):
    assert verify_math(completion, "5").reward == 0.0


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="answer_type"):
        verify_math("5", "5", answer_type="number")
