"""Dynamic sampling: bounded, and never silent."""

from __future__ import annotations

import pytest

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.dynamic import DynamicConfig, draw_groups
from tests.rl.rollouts import group


def source(*attempts):
    """A draw that gives the lists of groups one after the other, the last one for ever, and notes what was asked."""
    asked = []

    def draw(attempt):
        asked.append(attempt)
        return attempts[min(attempt, len(attempts) - 1)]

    return draw, asked


GOOD = [group(0, 1.0, 0.0), group(1, 0.0, 1.0)]
HALF = [group(10, 1.0, 1.0), group(11, 1.0, 0.0)]
FLAT = [group(20, 0.0, 0.0), group(21, None, 1.0)]


def test_switched_off_it_keeps_every_group():
    draw, asked = source(FLAT)
    drawn = draw_groups(draw, num_groups=2, config=DynamicConfig())
    assert drawn.groups == tuple(FLAT) and asked == [0] and drawn.message == ""
    assert drawn.num_constant == 2


def test_constant_groups_are_replaced_by_other_prompts():
    draw, asked = source(HALF, FLAT, GOOD)
    drawn = draw_groups(draw, num_groups=2, config=DynamicConfig(max_rounds=5))
    assert [g.group_id for g in drawn.groups] == [11, 0]
    assert asked == [0, 1, 2]
    assert (drawn.num_constant, drawn.num_rounds, len(drawn.generated), drawn.message) == (3, 2, 6, "")


def test_all_rewards_equal_for_ever_ends_with_a_message():
    draw, asked = source(FLAT)
    drawn = draw_groups(draw, num_groups=2, config=DynamicConfig(max_rounds=3))
    assert asked == [0, 1, 2, 3]
    assert drawn.groups == tuple(FLAT)  # advantages 0: the step teaches nothing but is a step
    assert "only 0 of 2 groups" in drawn.message and "8 of 8" in drawn.message


def test_what_was_found_is_used_when_the_rounds_are_over():
    draw, _ = source(HALF, FLAT)
    drawn = draw_groups(draw, num_groups=2, config=DynamicConfig(max_rounds=2))
    assert [g.group_id for g in drawn.groups] == [11]
    assert "only 1 of 2" in drawn.message


def test_it_can_be_told_to_fail():
    draw, _ = source(FLAT)
    with pytest.raises(TaskError, match="after 2 redraws"):
        draw_groups(draw, num_groups=2, config=DynamicConfig(max_rounds=2, on_exhausted="fail"))


def test_a_draw_without_groups_is_a_broken_task():
    with pytest.raises(TaskError, match="no problem"):
        draw_groups(lambda attempt: [], num_groups=1, config=DynamicConfig())


@pytest.mark.parametrize("wrong", [{"max_rounds": -1}, {"on_exhausted": "stop"}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        DynamicConfig(**wrong)
