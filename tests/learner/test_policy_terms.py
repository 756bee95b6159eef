"""Which ratio an algorithm takes and what its clip does, against formulas written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from onegrid.errors import ConfigError
from onegrid.learner.loss import LossConfig, loss_metrics, policy_loss, token_weights
from onegrid.learner.policy_terms import POLICIES
from tests.bytes import assert_same_bytes

LENGTHS = (3, 1, 4)


def step(device="cpu", *, scale=0.3, seed=0):
    """A step of three sequences with a masked token; the old policy is `scale` away."""
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(8, generator=generator) * 2
    old = logp + scale * torch.randn(8, generator=generator)
    advantage = torch.tensor([1.0, 1, 1, -0.5, -2, -2, -2, -2])
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    return [x.to(device) for x in (logp, old, advantage, mask)]


def run(config, *, split=False, **settings):
    """Loss, metrics, gradient."""
    logp, old, advantage, mask = step(**settings)
    weights = token_weights(list(mask.split(LENGTHS)), config.aggregation, config.max_len)
    logp = logp.requires_grad_()
    chunks = [(s,) for s in range(3)] if split else [(0, 1, 2)]
    total, parts = 0.0, []
    for chunk in chunks:

        def take(x, chunk=chunk):
            return torch.cat([x.split(LENGTHS)[i] for i in chunk])

        loss, sums = policy_loss(
            take(logp),
            take(old),
            advantage_N=take(advantage),
            weight_N=torch.cat([weights[i] for i in chunk]),
            mask_N=take(mask),
            config=config,
            lengths=[LENGTHS[i] for i in chunk],
        )
        loss.backward()
        total += loss.item()
        parts.append(sums)
    return total, loss_metrics(parts), logp.grad


def test_gspo_has_one_ratio_for_a_sequence_and_its_objective_is_the_papers():
    config = LossConfig(policy="gspo", aggregation="seq_mean_token_mean", clip_low=0.1, clip_high=0.1)
    loss, metrics, gradient = run(config)
    logp, old, advantage, mask = (x.double() for x in step())
    logp.requires_grad_()
    objective = 0.0
    for p, q, a, m in zip(*(x.split(LENGTHS) for x in (logp, old, advantage, mask.bool())), strict=True):
        ratio = (p[m] - q[m]).mean().exp()
        objective = objective + torch.minimum(ratio * a[m][0], ratio.clamp(0.9, 1.1) * a[m][0]) / 3
    (-objective).backward()
    assert loss == pytest.approx(-objective.item(), rel=1e-6)  # ratios and weights are rounded to FP32
    assert torch.allclose(gradient.double(), logp.grad, rtol=1e-5, atol=1e-9)
    assert gradient[1] == 0.0 and metrics["train/clip_low"] + metrics["train/clip_high"] > 0


def test_gspo_clips_whole_sequences():
    config = LossConfig(policy="gspo", clip_low=3e-4, clip_high=4e-4)
    _, _, gradient = run(config)
    logp, old, advantage, mask = step()
    for g, p, q, a, m in zip(*(x.split(LENGTHS) for x in (gradient, logp, old, advantage, mask)), strict=True):
        ratio = (p[m] - q[m]).mean().exp()
        clipped = ratio > 1 + 4e-4 if a[0] > 0 else ratio < 1 - 3e-4
        assert (g[m] == 0).all() if clipped else (g[m] != 0).all()


def test_cispo_weighs_every_token_by_its_clipped_ratio_and_drops_none():
    config = LossConfig(policy="cispo", clip_low=1.0, clip_high=0.1)
    loss, metrics, gradient = run(config)
    logp, old, advantage, mask = (x.double() for x in step())
    ratio = (logp - old).exp().clamp(max=1.1)
    expected = -(advantage * ratio * mask) / 7
    assert torch.allclose(gradient.double(), expected, rtol=1e-5, atol=1e-9)  # FP32 exp and products
    assert loss == pytest.approx((expected * logp).sum().item(), rel=1e-5)
    assert (gradient[mask.bool()] != 0).all()
    assert metrics["train/clip_high"] > 0 and metrics["train/clip_low"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_have_the_same_gradient_on_policy(policy):
    """At ratio 1 each is the plain policy gradient -A grad logp."""
    _, _, gradient = run(LossConfig(policy=policy, aggregation="seq_mean_token_mean"), scale=0.0)
    _, _, advantage, mask = step()
    weights = torch.cat(token_weights(list(mask.split(LENGTHS)), "seq_mean_token_mean"))
    assert torch.allclose(gradient, -advantage * weights, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_case_L1_no_policy_depends_on_the_split(policy, device):
    config = LossConfig(policy=policy, aggregation="seq_mean_token_mean")
    loss, metrics, gradient = run(config, device=device)
    split_loss, split_metrics, split_gradient = run(config, device=device, split=True)
    assert split_loss == pytest.approx(loss, rel=1e-12)  # float64 sums in another order
    assert split_metrics == pytest.approx(metrics, rel=1e-12)
    assert_same_bytes(split_gradient, gradient)


def test_case_M6_a_step_without_tokens_has_loss_zero_under_every_policy():
    for policy in POLICIES:
        logp = torch.zeros(3, requires_grad=True)
        nothing = torch.full((3,), math.nan)
        mask = torch.zeros(3, dtype=torch.bool)
        loss, _ = policy_loss(
            logp,
            nothing,
            advantage_N=nothing,
            weight_N=torch.zeros(3),
            mask_N=mask,
            config=LossConfig(policy=policy),
            lengths=[2, 1],
        )
        loss.backward()
        assert loss.item() == 0.0 and logp.grad.count_nonzero() == 0


def test_gspo_without_lengths_is_refused():
    one = torch.ones(1)
    with pytest.raises(ConfigError, match="lengths"):
        policy_loss(one, one, advantage_N=one, weight_N=one, mask_N=one.bool(), config=LossConfig(policy="gspo"))
