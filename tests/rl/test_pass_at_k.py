"""Estimators of what a model can do, against brute force and published values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from onegrid.errors import ConfigError, EmptyBatchError
from onegrid.rl.pass_at_k import mean_pass_at_k, pass_at_k, wilson


@pytest.mark.parametrize("tries", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_right_one(tries):
    for right, k in itertools.product(range(tries + 1), range(1, tries + 1)):
        answers = [i < right for i in range(tries)]
        draws = list(itertools.combinations(answers, k))
        expected = sum(map(any, draws)) / len(draws)
        assert pass_at_k(tries, right, k) == pytest.approx(expected, rel=1e-12, abs=1e-15)  # a product of < 7 factors


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
    draws, share, k = random.Random(0), 0.1, 5
    rounds = [sum(draws.random() < share for _ in range(8)) for _ in range(20_000)]
    true = 1 - (1 - share) ** k
    unbiased = sum(pass_at_k(8, right, k) for right in rounds) / len(rounds)
    plug_in = sum(1 - (1 - right / 8) ** k for right in rounds) / len(rounds)
    assert abs(unbiased - true) < 4 * 0.5 / math.sqrt(len(rounds))  # four standard errors of values in 0 .. 1
    assert abs(plug_in - true) > 0.02


def test_pass_at_k_of_many_tries_does_not_overflow():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("arguments", [(5, 6, 1), (5, 2, 6), (5, 2, 0), (5, -1, 1)])
def test_pass_at_k_of_what_cannot_be_is_refused(arguments):
    with pytest.raises(ConfigError):
        pass_at_k(*arguments)


def test_problems_with_too_few_tries_are_left_out():
    share = mean_pass_at_k([(4, 4), (4, 0), (1, 1)], 2)
    assert share is not None and share.estimate == 0.5
    assert mean_pass_at_k([(1, 1)], 2) is None


@pytest.mark.parametrize("num_right", [0, 4])
def test_where_every_problem_is_alike_the_interval_is_not_empty(num_right):
    found = mean_pass_at_k([(4, num_right)] * 8, 2)
    assert found == wilson(2 * num_right, 8) and found.high - found.low > 0.3


def test_the_interval_of_wilson_is_that_of_the_textbook():
    share = wilson(8, 10)  # Newcombe (1998) prints .4902 to .9433 for 8 of 10
    assert (round(share.low, 4), round(share.high, 4)) == (0.4902, 0.9433)
    share = wilson(81, 263)  # and .2553 to .3662 for 81 of 263
    assert (round(share.low, 4), round(share.high, 4)) == (0.2553, 0.3662)
    assert wilson(0, 10).low == 0.0 and 0.25 < wilson(0, 10).high < 0.31
    assert wilson(10, 10).high == 1.0
    with pytest.raises(EmptyBatchError):
        wilson(0, 0)
