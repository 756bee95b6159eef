"""The loss: aggregation that no split can change, clips, and masks that let nothing through."""

from __future__ import annotations

import math

import pytest
import torch

from onegrid.errors import ConfigError, NonFiniteError
from onegrid.learner.loss import AGGREGATIONS, LossConfig, loss_metrics, policy_loss, token_weights
from tests.bytes import assert_same_bytes

POISON = [float("nan"), float("inf"), -float("inf"), 1e10, -1e10]
FULL = LossConfig(clip_high=0.28, clip_dual=3.0, kl_coefficient=0.1, entropy_coefficient=0.01)


def config_of(aggregation):
    return LossConfig(aggregation=aggregation, max_len=8 if aggregation == "dr_grpo" else None)


def example(device, *, lengths=(4, 1, 6, 3), seed=0):
    """Inputs of a step per sequence; the third sequence is masked whole, others in part."""
    generator = torch.Generator().manual_seed(seed)
    step = []
    for i, n in enumerate(lengths):
        logp = -torch.rand(n, generator=generator) * 3
        mask = torch.rand(n, generator=generator) < 0.8
        mask[0] = True
        step.append(
            {
                "logp_N": logp,
                "old_logp_N": logp + 0.4 * torch.randn(n, generator=generator),
                "advantage_N": torch.randn(n, generator=generator),
                "reference_logp_N": logp + 0.2 * torch.randn(n, generator=generator),
                "correction_N": 0.5 + torch.rand(n, generator=generator),
                "entropy_N": torch.rand(n, generator=generator),
                "mask_N": mask & (i != 2),
            }
        )
    return [{name: x.to(device) for name, x in sequence.items()} for sequence in step]


def run(step, *, config, split=None):
    """Loss, metrics and gradient of a step in micro-batches of `split` sequences (default: all at once)."""
    weights = token_weights([s["mask_N"] for s in step], config.aggregation, config.max_len)
    logps = [s["logp_N"].clone().requires_grad_() for s in step]
    split = split or len(step)
    total, parts = 0.0, []
    for start in range(0, len(step), split):
        chunk = range(start, min(start + split, len(step)))
        inputs = {name: torch.cat([step[i][name] for i in chunk]) for name in step[0] if name != "logp_N"}
        loss, sums = policy_loss(
            torch.cat([logps[i] for i in chunk]),
            inputs.pop("old_logp_N"),
            weight_N=torch.cat([weights[i] for i in chunk]),
            config=config,
            lengths=[len(step[i]["mask_N"]) for i in chunk],
            **inputs,
        )
        loss.backward()
        total += loss.item()
        parts.append(sums)
    return total, loss_metrics(parts), [p.grad for p in logps]


def aggregate(losses, masks, aggregation, max_len=None):
    weights = token_weights(masks, aggregation, max_len)
    return sum((w * x).sum().item() for w, x in zip(weights, losses, strict=True))


def test_case_L1_token_mean_is_over_the_tokens_of_the_step():
    losses = [torch.tensor([4.0]), torch.tensor([1.0, 1.0, 1.0])]
    masks = [torch.ones(1, dtype=torch.bool), torch.ones(3, dtype=torch.bool)]
    assert aggregate(losses, masks, "token_mean") == 1.75
    assert aggregate(losses, masks, "seq_mean_token_mean") == pytest.approx(2.5, rel=2**-23)  # 1/6 rounded to FP32
    assert aggregate(losses, masks, "dr_grpo", 8) == 7 / 16


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_case_L1_no_split_into_micro_batches_or_ranks_changes_a_gradient(aggregation, device):
    step = example(device)
    whole, _, gradients = run(step, config=config_of(aggregation))
    for split in (1, 2, 3):  # 1: a micro-batch without tokens; 2: also two ranks that add; 3: a last window not full
        loss, _, others = run(step, config=config_of(aggregation), split=split)
        assert loss == pytest.approx(whole, rel=1e-12)  # float64 sums in another order
        assert_same_bytes(others, gradients)  # a token's gradient is computed alone


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_case_L3_padding_changes_nothing(aggregation, device):
    def padded(width):
        step = example(device)
        for sequence in step:
            short = width - len(sequence["mask_N"])
            for name, x in sequence.items():
                sequence[name] = torch.cat([x, torch.zeros(short, dtype=x.dtype, device=device)])
        return run(step, config=config_of(aggregation))

    to_8, to_16 = padded(8), padded(16)
    assert to_8[0] == to_16[0] and to_8[1] == to_16[1]
    assert_same_bytes([g[:8] for g in to_16[2]], to_8[2])
    assert all(g[8:].count_nonzero() == 0 for g in to_16[2])


def test_case_L4_logged_values_do_not_depend_on_the_split(device):
    step = example(device)
    _, whole, _ = run(step, config=FULL)
    assert {"train/loss", "train/pg_loss", "train/ref_kl", "train/kl_loss", "train/clip_low"} <= whole.keys()
    for split in (1, 2):
        _, metrics, _ = run(step, config=FULL, split=split)
        assert metrics == pytest.approx(whole, rel=1e-12)  # float64 sums in another order


@pytest.mark.parametrize("poison", POISON)
def test_case_M4_what_masked_positions_hold_changes_no_loss_metric_or_gradient(poison, device):
    loss, metrics, gradients = run(example(device), config=FULL)
    dirty = example(device)
    for sequence in dirty:
        for name, x in sequence.items():
            if name != "mask_N":
                x[~sequence["mask_N"]] = poison
    dirty_loss, dirty_metrics, dirty_gradients = run(dirty, config=FULL)
    assert dirty_loss == loss and dirty_metrics == metrics
    assert_same_bytes(dirty_gradients, gradients)


def test_case_M6_a_step_without_tokens_has_loss_zero_and_zero_gradients(device):
    step = example(device)
    for sequence in step:
        sequence["mask_N"][:] = False
        sequence["advantage_N"][:] = float("nan")
    loss, metrics, gradients = run(step, config=FULL)
    assert loss == 0.0
    assert all(g.count_nonzero() == 0 and g.isfinite().all() for g in gradients)
    assert metrics == {"train/loss": 0.0, "train/pg_loss": 0.0, "train/kl_loss": 0.0, "train/entropy_loss": 0.0}
    for aggregation in AGGREGATIONS:
        weights = token_weights([s["mask_N"] for s in step], aggregation, config_of(aggregation).max_len)
        assert all(w.count_nonzero() == 0 for w in weights)


def test_case_M6_a_masked_sequence_does_not_dilute_the_mean_over_sequences():
    weights = token_weights([torch.tensor([True]), torch.tensor([False])], "seq_mean_token_mean")
    assert [w.tolist() for w in weights] == [[1.0], [0.0]]


def one_token(ratio, advantage, config, **inputs):
    """Loss and gradient of a single token with this probability ratio."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float32, requires_grad=True)
    one = torch.ones(1)
    loss, sums = policy_loss(
        logp,
        torch.zeros(1),
        advantage_N=torch.tensor([advantage]),
        weight_N=one,
        mask_N=one.bool(),
        config=config,
        **inputs,
    )
    loss.backward()
    return loss.item(), logp.grad.item(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.25, 2.0, -2.5, -2.5, None),  # below 1.28: DAPO's upper clip leaves it alone
        (1.5, 2.0, -2.56, 0.0, "clip_high"),
        (1.5, -2.0, 3.0, 3.0, None),  # a bad token made likelier is pushed down, unclipped
        (0.5, -2.0, 1.6, 0.0, "clip_low"),
        (0.5, 2.0, -1.0, -1.0, None),
        (5.0, -2.0, 6.0, 0.0, "clip_dual"),
    ],
)
def test_the_clips_act_on_the_side_they_should(ratio, advantage, loss, gradient, clipped):
    found, slope, sums = one_token(ratio, advantage, LossConfig(clip_low=0.2, clip_high=0.28, clip_dual=3.0))
    assert found == pytest.approx(loss, rel=1e-6)  # FP32 exp and products
    assert slope == pytest.approx(gradient, rel=1e-6)
    assert {name for name in ("clip_low", "clip_high", "clip_dual") if sums[name]} == ({clipped} if clipped else set())


def test_the_kl_term_is_k3_and_is_logged_with_coefficient_zero_too():
    reference = torch.tensor([0.3])
    expected = math.expm1(float(reference)) - float(reference)
    off, slope, sums = one_token(1.0, 0.0, LossConfig(), reference_logp_N=reference)
    assert (off, slope) == (0.0, 0.0)
    assert sums["ref_kl"] == pytest.approx(expected, rel=1e-12)
    on, slope, sums = one_token(1.0, 0.0, LossConfig(kl_coefficient=0.5), reference_logp_N=reference)
    assert on == pytest.approx(0.5 * expected, rel=1e-12)
    assert slope == pytest.approx(-0.5 * math.expm1(float(reference)), rel=1e-6)  # pulls towards the reference


def test_correction_weights_scale_the_policy_gradient_and_get_no_gradient():
    correction = torch.tensor([0.25], requires_grad=True)
    loss, slope, sums = one_token(1.0, 2.0, LossConfig(), correction_N=correction)
    assert (loss, slope, sums["correction"]) == (-0.5, -0.5, 0.25)
    assert correction.grad is None


def test_the_entropy_bonus_lowers_the_loss():
    entropy = torch.tensor([2.0], requires_grad=True)
    loss, _, sums = one_token(1.0, 0.0, LossConfig(entropy_coefficient=0.1), entropy_N=entropy)
    assert loss == pytest.approx(-0.2, rel=1e-6)
    assert entropy.grad.item() == pytest.approx(-0.1, rel=1e-6)
    assert sums["entropy"] == 2.0


def test_a_huge_ratio_stays_finite():
    loss, slope, _ = one_token(1e30, -1.0, LossConfig())
    assert loss == pytest.approx(math.exp(20), rel=1e-6)
    assert slope == 0.0


@pytest.mark.parametrize("name", ["old_logp_N", "advantage_N", "reference_logp_N", "correction_N"])
def test_a_non_finite_value_under_the_mask_is_refused_by_name(name, device):
    step = example(device)
    step[0][name][0] = float("nan")
    with pytest.raises(NonFiniteError, match=f"1 in {name.removesuffix('_N')}"):
        run(step, config=FULL)


@pytest.mark.parametrize(
    "wrong",
    [
        {"aggregation": "token-mean"},
        {"policy": "grpo"},
        {"clip_dual": 3.0, "policy": "cispo"},
        {"max_len": None, "aggregation": "dr_grpo"},
        {"max_len": 8},
        {"max_len": 0, "aggregation": "dr_grpo"},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"clip_dual": 1.0},
        {"kl_coefficient": float("nan")},
        {"entropy_coefficient": -1.0},
    ],
)
def test_a_loss_that_cannot_be_is_a_configuration_error(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossConfig(**wrong)


def test_a_term_without_its_input_is_refused():
    with pytest.raises(ConfigError, match="reference"):
        one_token(1.0, 1.0, LossConfig(kl_coefficient=0.1))
    with pytest.raises(ConfigError, match="entropy"):
        one_token(1.0, 1.0, LossConfig(entropy_coefficient=0.1))
