"""Metrics of mismatch: the formulas, the mask, and what may not be turned into a number."""

from __future__ import annotations

import math

import pytest
import torch

from onegrid.errors import MismatchError, NonFiniteError
from onegrid.mismatch import compare, mirror_rollout_corr

NAMES = ["kl", "k3", "log_ppl_abs_diff", "chi2_token", "chi2_seq", "pearson", "max_abs", "p99", "share_equal"]
KEYS = {"mismatch/" + name for name in [*NAMES, "token_mult_prob_error", "ess", "tokens"]}
POISON = [float("nan"), float("inf"), -float("inf"), 1e10, -1e10]


def two_sides(device, *, lengths=(5, 1, 7), seed=0):
    """Log-probabilities of learner and sampler and an irregular mask."""
    generator = torch.Generator().manual_seed(seed)
    learner = [-torch.rand(n, generator=generator) * 4 for n in lengths]
    sampler = [p + 0.1 * torch.randn(len(p), generator=generator) for p in learner]
    mask = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    mask[0][0] = True
    return tuple([x.to(device) for x in side] for side in (learner, sampler, mask))


def ones(*lengths):
    return [torch.ones(n, dtype=torch.bool) for n in lengths]


def test_every_metric_is_the_formula_of_the_contract():
    p = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    q = [torch.tensor([-1.5, -2.0]), torch.tensor([-0.25])]
    d = [0.5, 0.0, -0.25]
    metrics = compare(p, q, ones(2, 1))
    w = [math.exp(x) for x in d]
    expected = {
        "tokens": 3,
        "kl": -sum(d) / 3,
        "k3": sum(math.expm1(x) - x for x in d) / 3,
        "log_ppl_abs_diff": (0.25 + 0.25) / 2,
        "chi2_token": sum(x * x for x in w) / 3 - 1,
        "chi2_seq": (math.exp(2 * 0.5) + math.exp(2 * -0.25)) / 2 - 1,
        "max_abs": 0.5,
        "p99": 0.25 + 0.98 * 0.25,  # position .99 x 2 between the 2nd and the 3rd
        "share_equal": 1 / 3,
        "token_mult_prob_error": sum(math.exp(abs(x)) for x in d) / 3,
        "ess": sum(w) ** 2 / (3 * sum(x * x for x in w)),
    }
    assert metrics.keys() == KEYS
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, rel=1e-12), name
    a = [math.exp(x) for x in (-1.0, -2.0, -0.5)]
    b = [math.exp(x) for x in (-1.5, -2.0, -0.25)]
    a, b = [x - sum(a) / 3 for x in a], [x - sum(b) / 3 for x in b]
    pearson = sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    assert metrics["mismatch/pearson"] == pytest.approx(pearson, rel=1e-12)


def test_equal_sides_have_exactly_no_mismatch(device):
    p, _, mask = two_sides(device)
    metrics = compare(p, [x.clone() for x in p], mask)
    for name in ("kl", "k3", "log_ppl_abs_diff", "chi2_token", "chi2_seq", "max_abs", "p99"):
        assert str(metrics[f"mismatch/{name}"]) == "0.0"  # no negative zero either
    for name in ("pearson", "share_equal", "token_mult_prob_error", "ess"):
        assert metrics[f"mismatch/{name}"] == 1.0


def test_one_bit_on_one_side_is_seen():
    p = [torch.tensor([-1.0, -2.0, -3.0, -4.0])]
    q = [p[0].clone()]
    q[0].view(torch.int32)[2] ^= 1
    metrics = compare(p, q, ones(4))
    assert metrics["mismatch/share_equal"] == 0.75
    assert metrics["mismatch/max_abs"] == 2.0**-22  # one unit in the last place of a value between 2 and 4


def test_equal_is_a_matter_of_bytes():
    metrics = compare([torch.tensor([0.0, -1.0])], [torch.tensor([-0.0, -1.0])], ones(2))
    assert metrics["mismatch/share_equal"] == 0.5
    assert metrics["mismatch/max_abs"] == 0.0


def test_correlation_is_absent_where_a_side_does_not_vary_and_one_where_the_bits_are_equal():
    constant, varied = [torch.full((3,), -0.7)], [torch.tensor([-0.7, -0.8, -0.9])]
    assert "mismatch/pearson" not in compare(constant, varied, ones(3))
    assert "mismatch/pearson" not in compare(varied, constant, ones(3))
    assert compare(constant, [constant[0].clone()], ones(3))["mismatch/pearson"] == 1.0


def test_large_differences_stay_finite_where_the_contract_clamps():
    metrics = compare([torch.tensor([-1.0, -500.0])], [torch.tensor([-400.0, -1.0])], ones(2))
    assert metrics["mismatch/k3"] == pytest.approx((math.expm1(20) - 20 + math.expm1(-20) + 20) / 2, rel=1e-12)
    assert metrics["mismatch/chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1, rel=1e-12)
    assert metrics["mismatch/kl"] == 50.0
    assert math.isfinite(metrics["mismatch/chi2_seq"])


@pytest.mark.parametrize("poison", POISON)
def test_case_M4_what_masked_positions_hold_changes_no_metric(poison, device):
    learner, sampler, mask = two_sides(device)
    clean = compare(learner, sampler, mask)
    for side in (learner, sampler):
        for x, m in zip(side, mask, strict=True):
            x[~m] = poison
        assert compare(learner, sampler, mask) == clean


def test_case_M4_the_one_real_token_gives_its_own_k3():
    metrics = compare([torch.tensor([-1.5, 0.0])], [torch.tensor([-1.0, -1e10])], [torch.tensor([True, False])])
    assert metrics["mismatch/k3"] == pytest.approx(0.1065307, abs=5e-8)  # the case gives seven digits


def test_case_M6_without_a_chosen_token_there_is_no_metric():
    nothing = [torch.zeros(2, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)]
    assert compare([torch.zeros(2), torch.zeros(1)], [torch.zeros(2), torch.ones(1)], nothing) == {}
    assert compare([], [], []) == {}


def test_case_M6_a_fully_masked_sequence_does_not_dilute_the_mean():
    p, q = [torch.tensor([0.0]), torch.tensor([float("nan")])], [torch.tensor([-1.0]), torch.tensor([3.0])]
    metrics = compare(p, q, [torch.tensor([True]), torch.tensor([False])])
    assert metrics["mismatch/log_ppl_abs_diff"] == 1.0
    assert metrics["mismatch/chi2_seq"] == pytest.approx(math.exp(2) - 1, rel=1e-12)


def test_case_M7_tokens_outside_the_mask_are_not_counted():
    zero = [torch.zeros(2)]
    for other in (5.0, 0.0, -3.0):
        metrics = compare([torch.tensor([0.1, other])], zero, [torch.tensor([True, False])])
        assert metrics["mismatch/kl"] == pytest.approx(-0.1, rel=1e-7)  # .1 as FP32
        assert metrics["mismatch/max_abs"] == pytest.approx(0.1, rel=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["learner", "sampler"])
def test_a_non_finite_value_under_the_mask_is_refused_by_name_and_count(value, side):
    logp = {"learner": [torch.zeros(3)], "sampler": [torch.zeros(3)]}
    logp[side][0][1] = value
    with pytest.raises(NonFiniteError, match=rf"{side}.* 1 of 3 "):
        compare(logp["learner"], logp["sampler"], ones(3))


def test_sides_that_do_not_belong_together_are_refused():
    with pytest.raises(MismatchError, match="2 sequences of the learner, 1 of the sampler"):
        compare([torch.zeros(1)] * 2, [torch.zeros(1)], ones(1))
    with pytest.raises(MismatchError, match="sequence 0"):
        compare([torch.zeros(2)], [torch.zeros(3)], ones(3))
    with pytest.raises(MismatchError, match="bfloat16"):
        compare([torch.zeros(2).bfloat16()], [torch.zeros(2)], ones(2))


def test_the_names_of_verl_carry_the_same_numbers():
    learner, sampler, mask = two_sides("cpu")
    metrics = compare(learner, sampler, mask)
    mirrored = mirror_rollout_corr(metrics)
    assert mirrored == {
        "rollout_corr/kl": metrics["mismatch/kl"],
        "rollout_corr/k3_kl": metrics["mismatch/k3"],
        "rollout_corr/log_ppl_abs_diff": metrics["mismatch/log_ppl_abs_diff"],
        "rollout_corr/chi2_token": metrics["mismatch/chi2_token"],
        "rollout_corr/chi2_seq": metrics["mismatch/chi2_seq"],
    }
    assert mirror_rollout_corr({}) == {}
