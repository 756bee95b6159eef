"""Advantages: by id, bounded, exactly 0 where a group says nothing."""

from __future__ import annotations

import math
import random

import pytest

from onegrid.errors import ConfigError, NonFiniteError, TaskError
from onegrid.rl.advantage import ESTIMATORS, advantages_of, group_advantages
from onegrid.types import Group
from tests.rl.rollouts import group, rollout


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.7] * 8, [0.1] * 3, [1.0], [0.0] * 5])
def test_case_G1_constant_groups_and_singles_have_advantage_zero(rewards, estimator):
    assert group_advantages(rewards, [3] * len(rewards), estimator) == [0.0] * len(rewards)


def test_case_G1_almost_constant_groups_stay_bounded():
    rewards = [0.35] * 7 + [0.95]
    for estimator in ESTIMATORS:
        found = group_advantages(rewards, [0] * 8, estimator)
        assert all(math.isfinite(a) and abs(a) <= math.sqrt(8 - 1) for a in found)
    # z-score of one in eight with the unbiased std: 7 / 8 / sqrt(1 / 8)
    assert group_advantages(rewards, [0] * 8)[7] == pytest.approx(7 / 8 / math.sqrt(1 / 8), rel=1e-5)
    tiny = [1.0, 1.0 + 2**-52, 1.0, 1.0]
    assert all(abs(a) <= math.sqrt(3) for a in group_advantages(tiny, [0] * 4))


def test_case_G1_the_std_is_the_unbiased_one():
    assert group_advantages([1.0, 0.0], [0, 0], eps=0.0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-15)
    assert group_advantages([1.0, 0.0], [0, 0], "dr_grpo") == [0.5, -0.5]
    assert group_advantages([1.0, 0.0], [0, 0], "rloo") == [1.0, -1.0]


def test_rloo_takes_the_mean_of_the_others():
    rewards = [1.0, 0.25, 0.5, 0.0]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert group_advantages(rewards, [0] * 4, "rloo") == pytest.approx(expected, rel=1e-15)


def test_case_G3_groups_are_ids_and_not_positions():
    rewards = [float(i // 8) for i in range(32)]
    assert group_advantages(rewards, [i // 8 for i in range(32)]) == [0.0] * 32


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_G3_shuffled_split_or_thinned_batches_give_a_rollout_the_same_bits(estimator):
    draws = random.Random(0)
    rows = [(draws.random(), draws.randrange(5)) for _ in range(40)]
    expected = dict(zip(rows, group_advantages([r for r, _ in rows], [i for _, i in rows], estimator), strict=True))
    shuffled = draws.sample(rows, len(rows))
    again = dict(
        zip(shuffled, group_advantages([r for r, _ in shuffled], [i for _, i in shuffled], estimator), strict=True)
    )
    assert again == expected
    some = [row for row in shuffled if row[1] in (1, 3)]  # other groups gone: a micro-batch of whole groups
    for row, advantage in zip(
        some, group_advantages([r for r, _ in some], [i for _, i in some], estimator), strict=True
    ):
        assert advantage == expected[row]


def test_case_G3_a_group_that_was_fanned_out_is_still_one_group():
    halves = [group(4, 1.0, 0.0), group(9, 1.0, 1.0), group(4, 0.0, 0.0)]
    assert advantages_of(halves, "dr_grpo") == [0.75, -0.25, 0.0, 0.0, -0.25, -0.25]


def test_case_V7_the_unscorable_are_masked_and_not_in_the_baseline():
    found = group_advantages([None, 1.0, 1.0, 0.0], [0] * 4, "dr_grpo")
    assert found[0] is None
    assert found[1:] == pytest.approx([1 / 3, 1 / 3, -2 / 3], rel=1e-15)
    assert group_advantages([None, None, 1.0], [0] * 3) == [None, None, 0.0]


def test_what_cannot_be_an_advantage_is_refused():
    with pytest.raises(NonFiniteError, match="group 5"):
        group_advantages([float("nan")], [5])
    with pytest.raises(ConfigError, match="grpo, dr_grpo, rloo"):
        group_advantages([1.0], [0], "gae")
    with pytest.raises(TaskError, match="1 of 1 rollouts"):
        advantages_of([Group(group_id=0, rollouts=(rollout(0, 0, scored=False),))])
