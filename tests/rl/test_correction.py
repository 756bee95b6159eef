"""Importance correction: caps, masks, and no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from onegrid.errors import ConfigError
from onegrid.rl.correction import CORRECTIONS, capped_share, correction_weights
from tests.bytes import assert_same_bytes

LOG_2 = math.log(2.0)


def sides(device):
    """Ratios .5, 4 and a masked token; then 1.5 and 1.5."""
    learner = [torch.tensor([-LOG_2, 2 * LOG_2, 9.0]), torch.log(torch.tensor([1.5, 1.5]))]
    sampler = [torch.zeros(3), torch.zeros(2)]
    mask = [torch.tensor([True, True, False]), torch.tensor([True, True])]
    return tuple([x.to(device) for x in side] for side in (learner, sampler, mask))


@pytest.mark.parametrize(
    ("mode", "expected", "share"),
    [
        ("off", [[1, 1, 1], [1, 1]], 0.0),
        ("token_truncate", [[0.5, 2, 1], [1.5, 1.5]], 0.25),
        ("token_mask", [[0.5, 0, 1], [1.5, 1.5]], 0.25),
        ("sequence_truncate", [[2, 2, 1], [2, 2]], 1.0),
        ("sequence_mask", [[2, 2, 1], [0, 0]], None),
    ],
)
def test_weights_are_the_ratios_up_to_the_cap(mode, expected, share, device):
    learner, sampler, mask = sides(device)
    cap = 2.0 + 1e-6 if mode == "sequence_mask" else 2.0  # the first sequence has ratio 2, give or take a rounding
    weights = correction_weights(learner, sampler, mask=mask, mode=mode, cap=cap)
    for w_R, right in zip(weights, expected, strict=True):
        assert w_R.tolist() == pytest.approx(right, rel=1e-6)  # FP32 logarithms
    if share is not None and not mode.startswith("sequence"):
        assert capped_share(weights, mask=mask, cap=2.0) == {"train/correction_capped_share": share}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_equal_sides_have_weight_one_and_no_gradient(mode):
    learner = [torch.tensor([-0.3, -2.0], requires_grad=True)]
    weights = correction_weights(
        learner, [learner[0].detach().clone()], mask=[torch.ones(2, dtype=torch.bool)], mode=mode, cap=2.0
    )
    assert_same_bytes(weights[0], torch.ones(2))
    assert not weights[0].requires_grad


@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e10])
def test_case_M4_what_masked_positions_hold_changes_no_weight(mode, poison, device):
    learner, sampler, mask = sides(device)
    clean = correction_weights(learner, sampler, mask=mask, mode=mode, cap=2.0)
    learner[0][2] = sampler[0][2] = poison
    assert_same_bytes(correction_weights(learner, sampler, mask=mask, mode=mode, cap=2.0), clean)


def test_case_M6_without_a_chosen_token_there_is_no_share():
    mask = [torch.tensor([False])]
    weights = correction_weights([torch.zeros(1)], [torch.ones(1)], mask=mask, mode="sequence_truncate", cap=2.0)
    assert weights[0].tolist() == [1.0]
    assert capped_share(weights, mask=mask, cap=2.0) == {}


def test_long_sequences_do_not_overflow():
    weights = correction_weights(
        [torch.zeros(1000)],
        [torch.full((1000,), -9.0)],
        mask=[torch.ones(1000, dtype=torch.bool)],
        mode="sequence_mask",
        cap=1e9,
    )
    assert weights[0].tolist() == pytest.approx([math.exp(20)] * 1000, rel=1e-6)


@pytest.mark.parametrize("wrong", [{"mode": "tis", "cap": 2.0}, {"mode": "off", "cap": 0.5}])
def test_an_unknown_mode_or_a_cap_below_one_is_refused(wrong):
    with pytest.raises(ConfigError):
        correction_weights([], [], mask=[], **wrong)
