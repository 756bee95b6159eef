"""The bootstrap over prompts: against a known case, and against the mistake of ignoring the pairing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from onegrid.errors import EmptyBatchError, NonFiniteError, TaskError
from onegrid.mismatch import PromptSums, kl_reduction, mean_with_interval, pool, sum_by_prompt


def sums_of(totals, num_tokens, ids=None):
    ids = range(len(totals)) if ids is None else ids
    return PromptSums(
        prompt_ids_P=np.array(ids, dtype=np.int64),
        total_P=np.array(totals, dtype=np.float64),
        num_tokens_P=np.array(num_tokens, dtype=np.int64),
    )


def test_the_interval_of_a_mean_is_the_normal_one_where_the_normal_one_is_right():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    interval = mean_with_interval(values.tolist(), seed=0)
    half = 1.959964 * values.std() / math.sqrt(400)
    assert interval.estimate == pytest.approx(values.mean(), rel=1e-12)
    # A quantile of 10,000 draws lies within about 3 sqrt(.025 x .975 / 10,000) / density(1.96) = .08 standard errors.
    tolerance = 0.08 * values.std() / math.sqrt(400)
    assert interval.low == pytest.approx(values.mean() - half, abs=tolerance)
    assert interval.high == pytest.approx(values.mean() + half, abs=tolerance)
    assert interval.excludes(0.0) and not interval.excludes(values.mean())


def test_the_interval_of_two_values_is_the_one_counted_by_hand():
    # Resamples of (0, 1) have mean 0, .5, 1 with shares 1/4, 1/2, 1/4: the 2.5 and 97.5 percentiles are 0 and 1, and
    # those at 60 % (20 and 80) too; at 40 % (30 and 70) both are .5.
    assert (mean_with_interval([0.0, 1.0], seed=3).low, mean_with_interval([0.0, 1.0], seed=3).high) == (0.0, 1.0)
    inner = mean_with_interval([0.0, 1.0], seed=3, level=0.4)
    assert (inner.low, inner.high) == (0.5, 0.5)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    values = [0.1, 0.5, 0.2, 0.9, 0.4]
    assert mean_with_interval(values, seed=1) == mean_with_interval(values, seed=1)
    assert mean_with_interval([*values, 0.77], seed=1) != mean_with_interval([*values, 0.77], seed=2)


def test_pairing_cancels_what_the_arms_share():
    generator = np.random.default_rng(0)
    shared = generator.gamma(1.0, 1.0, 200)  # prompts differ wildly, arms by a tenth
    first, second = sums_of(shared * 10, [10] * 200), sums_of(shared * 9, [10] * 200)
    reduction = kl_reduction(first, second, seed=0)
    assert reduction.relative.estimate == pytest.approx(0.1, rel=1e-12)
    assert reduction.relative.low == pytest.approx(0.1, rel=1e-9)  # every resample of prompts has the same ratio
    assert reduction.relative.high == pytest.approx(0.1, rel=1e-9)
    assert reduction.absolute.excludes(0.0)
    alone = mean_with_interval(shared.tolist(), seed=0)
    assert alone.high - alone.low > 0.2  # unpaired, a difference of a tenth would drown


def test_the_mean_is_over_tokens_and_resampling_over_prompts():
    assert sums_of([4.0, 3.0], [1, 3]).mean == 1.75
    constant = kl_reduction(sums_of([2.0, 6.0], [1, 3]), sums_of([1.0, 3.0], [1, 3]), seed=0)
    assert (constant.absolute.low, constant.absolute.high) == (1.0, 1.0)
    assert constant.relative.estimate == 0.5


def test_arms_without_a_difference_are_told_apart_in_one_case_of_twenty():
    generator = np.random.default_rng(0)
    num_told = 0
    for seed in range(200):
        first, second = (sums_of(generator.normal(1.0, 0.5, 60), [1] * 60) for _ in range(2))
        num_told += kl_reduction(first, second, seed=seed, num_resamples=500).absolute.excludes(0.0)
    assert 2 <= num_told <= 20  # 10 expected, standard deviation 3.1


def test_a_first_arm_without_mismatch_has_no_relative_reduction():
    zero = sums_of([0.0, 0.0], [5, 5])
    reduction = kl_reduction(zero, zero, seed=0)
    assert reduction.relative is None
    assert (reduction.absolute.estimate, reduction.absolute.low, reduction.absolute.high) == (0.0, 0.0, 0.0)


def test_arms_with_other_prompts_are_refused():
    with pytest.raises(TaskError, match=r"\[2, 3\]"):
        kl_reduction(sums_of([1.0, 1.0], [1, 1], ids=[1, 2]), sums_of([1.0, 1.0], [1, 1], ids=[1, 3]), seed=0)


def test_sums_go_by_prompt_leave_masked_tokens_out_and_pool_over_steps():
    values = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3.0]), torch.tensor([7.0])]
    mask = [torch.tensor([True, False]), torch.tensor([True, True]), torch.tensor([False])]
    step = sum_by_prompt(values, [9, 4, 5], mask=mask)
    assert step.prompt_ids_P.tolist() == [4, 9]
    assert step.total_P.tolist() == [5.0, 1.0]
    assert step.num_tokens_P.tolist() == [2, 1]
    both = pool([step, sums_of([10.0], [10], ids=[9])])
    assert both.total_P.tolist() == [5.0, 11.0]
    assert both.num_tokens_P.tolist() == [2, 11]


def test_nothing_and_nan_have_no_mean():
    with pytest.raises(EmptyBatchError):
        mean_with_interval([], seed=0)
    with pytest.raises(EmptyBatchError):
        kl_reduction(sums_of([], []), sums_of([], []), seed=0)
    with pytest.raises(NonFiniteError, match="1 of 2"):
        mean_with_interval([1.0, float("nan")], seed=0)
    with pytest.raises(NonFiniteError, match="prompt 3"):
        sum_by_prompt([torch.tensor([float("inf")])], [3], mask=[torch.tensor([True])])
