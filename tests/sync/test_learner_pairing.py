"""Learner and engine over a synchronization: the same log-probabilities, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.mismatch.metrics import compare
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.spec import tensor_shapes
from onegrid.recipe import PRESETS, Plan
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from onegrid.types import Batch, Rollout, Sequence
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import MODELS, plan_of, requests_of


def batch_of(rollouts: list[Rollout]) -> Batch:
    """What the learner sees of rollouts, with made-up advantages."""
    sequences = []
    for i, r in enumerate(rollouts):
        length = len(r.tokens_R)
        sequences.append(
            Sequence(
                tokens_T=torch.cat([torch.tensor(r.request.prompt_tokens), r.tokens_R]),
                num_prompt=len(r.request.prompt_tokens),
                sampler_logp_R=r.logp_R,
                version_R=r.version_R,
                advantage_R=torch.full((length,), 1.0 - 2 * (i % 2)),
                mask_R=torch.ones(length, dtype=torch.bool),
                group_id=r.request.prompt_index,
                kept=r.kept,
                routing_RLE=r.routing_RLE,
            )
        )
    return Batch(sequences=tuple(sequences), temperature=rollouts[0].request.sampling.temperature)


def learner_of(model: str, preset: str, *, plan: Plan | None = None, device="cpu", **config) -> tuple[Learner, Engine]:
    """A learner with random weights and an engine that waits for them."""
    spec, made = plan_of(model, preset)
    plan = plan or made
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in tensor_shapes(spec).items()
    }
    learner = Learner(spec, plan, weights, LearnerConfig(lr=3e-3, **config), device=device)
    live = LiveWeights(spec, plan, side="sampler", device=device)
    engine = Engine(live, SamplerConfig(max_slots=5, max_len=64))
    return learner, engine


def sync(learner: Learner, engine: Engine) -> None:
    """The learner's version into the engine."""
    push(
        Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=learner.canonical()),
        engine,
        bucket_bytes=5000,
    )


EXACT = [(model, name) for model in MODELS for name in PRESETS if (model, name) != ("dense", "nvfp4_experts")]
EXACT = [(model, name) for model, name in EXACT if name != "fp8_tensor"]


@pytest.mark.parametrize(("model", "preset"), EXACT)
def test_log_probs_are_the_same_bits_after_every_update(model, preset, device):
    learner, engine = learner_of(model, preset, device=device)
    assert learner.plan.exact
    for update in range(3):
        sync(learner, engine)
        rollouts = engine.generate(requests_of(6, temperature=1.3))
        assert {int(v) for r in rollouts for v in r.version_R} == {update}
        batch = batch_of(rollouts)
        report = learner.forward_backward(batch)
        assert_same_bytes([x.cpu() for x in report.logp], [r.logp_R.cpu() for r in rollouts])
        learner.step()
    assert learner.version == 3
    assert engine.version == 2


@pytest.mark.parametrize(("model", "preset"), [("dense", "nvfp4_all"), ("moe", "mxfp8")])
def test_hundreds_of_captured_steps_have_the_learners_bits_while_weights_change(model, preset, gpu):
    learner, engine = learner_of(model, preset, device=gpu)
    assert engine.capabilities.captured
    steps = 0
    for update in range(40):
        sync(learner, engine)
        rollouts = engine.generate(requests_of(6, seed=update, max_new_tokens=24))  # into 5 slots
        report = learner.forward_backward(batch_of(rollouts))
        assert_same_bytes([x.cpu() for x in report.logp], [r.logp_R.cpu() for r in rollouts], f"update {update}")
        learner.step()
        steps += max(len(r.tokens_R) for r in rollouts)
    assert steps >= 300


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_quantized_cache_is_exact_when_the_learner_attends_to_the_same_grid(model):
    _, plan = plan_of(model, "mxfp8", kv_cache="fp8", learner_kv="fp8")
    assert plan.exact
    learner, engine = learner_of(model, "mxfp8", plan=plan)
    sync(learner, engine)
    rollouts = engine.generate(requests_of(6))
    assert_same_bytes(learner.log_probs(batch_of(rollouts)), [r.logp_R for r in rollouts])
    _, one_sided = plan_of(model, "mxfp8", kv_cache="fp8", learner_kv="bf16")
    assert not one_sided.exact and any("cache" in reason for reason in one_sided.reasons)
    learner, engine = learner_of(model, "mxfp8", plan=one_sided)
    sync(learner, engine)
    rollouts = engine.generate(requests_of(6))
    apart = _apart(learner.log_probs(batch_of(rollouts)), rollouts)
    assert 0 < apart["mismatch/max_abs"] < 1.0


def test_tensorwise_activations_are_measured_not_promised():
    learner, engine = learner_of("dense", "fp8_tensor")
    assert not learner.plan.exact
    sync(learner, engine)
    rollouts = engine.generate(requests_of(9))
    apart = _apart(learner.log_probs(batch_of(rollouts)), rollouts)
    assert 0 < apart["mismatch/max_abs"] < 1.0
    assert apart["mismatch/share_equal"] < 1.0


def test_a_mixed_pairing_is_legal_marked_and_served_on_its_own_grid():
    model, preset = "moe", "mxfp8"
    rules = tuple(
        replace(rule, sampler_weight=None, sampler_activation=None) if rule.weight else rule
        for rule in PRESETS[preset].rules
    )
    _, mixed = plan_of(model, preset, rules=rules)
    assert mixed.mixed and not mixed.exact
    learner, engine = learner_of(model, preset, plan=mixed)
    sync(learner, engine)
    assert {live.format for live in engine.describe().values()} == {"bf16"}
    rollouts = engine.generate(requests_of(9))
    assert 0 < _apart(learner.log_probs(batch_of(rollouts)), rollouts)["mismatch/max_abs"] < 2.0


@pytest.mark.parametrize("side", ["learner", "sampler"])
@pytest.mark.parametrize(("model", "preset"), [("moe", "mxfp8"), ("dense", "mxfp4"), ("moe", "nvfp4_all")])
def test_one_flipped_code_byte_on_either_side_is_seen(model, preset, side):
    learner, engine = learner_of(model, preset)
    sync(learner, engine)
    live = learner.live if side == "learner" else engine.weights
    name = "model.layers.0.self_attn.v_proj.weight"
    live.parts(name)["codes"][0, 0] ^= 0x42
    live.derive()
    rollouts = engine.generate(requests_of(9))
    assert _apart(learner.log_probs(batch_of(rollouts)), rollouts)["mismatch/share_equal"] < 1.0


@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("max_tokens", [1, 40])
def test_micro_batches_and_the_order_of_requests_change_no_bit(order, max_tokens):
    learner, engine = learner_of("moe", "mxfp8", max_tokens=max_tokens)
    sync(learner, engine)
    requests = requests_of(9)
    if order is not None:
        requests = [requests[i] for i in torch.randperm(9, generator=torch.Generator().manual_seed(order)).tolist()]
    rollouts = engine.generate(requests)
    assert_same_bytes(learner.log_probs(batch_of(rollouts)), [r.logp_R for r in rollouts])


def _apart(logp: list[torch.Tensor], rollouts: list[Rollout]) -> dict[str, float]:
    return compare(logp, [r.logp_R for r in rollouts], [torch.ones_like(x, dtype=torch.bool) for x in logp])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 4}], ids=str)
def test_case_M1_the_ratio_is_exactly_one_at_every_temperature_and_truncation(temperature, truncation):
    learner, engine = learner_of("dense", "bf16")
    sync(learner, engine)
    rollouts = engine.generate(requests_of(6, temperature=temperature, **truncation))
    logp = learner.log_probs(batch_of(rollouts))
    assert_same_bytes(logp, [r.logp_R for r in rollouts])
    assert all(bool(torch.isfinite(x).all()) for x in logp)
