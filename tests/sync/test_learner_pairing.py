"""Learner and engine over a synchronization: the same log-probabilities, bit for bit."""

from __future__ import annotations

import pytest
import torch

from onegrid.learner.learner import Learner, LearnerConfig
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.spec import tensor_shapes
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from onegrid.types import Batch, Rollout, Sequence
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import plan_of, requests_of


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


def learner_of(model: str, preset: str) -> tuple[Learner, Engine]:
    """A learner with random weights and an engine that waits for them."""
    spec, plan = plan_of(model, preset)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in tensor_shapes(spec).items()
    }
    learner = Learner(spec, plan, weights, LearnerConfig(lr=3e-3))
    engine = Engine(LiveWeights(spec, plan, side="sampler"), SamplerConfig(max_slots=5, max_len=64))
    return learner, engine


def sync(learner: Learner, engine: Engine) -> None:
    """The learner's version into the engine."""
    push(
        Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=learner.canonical()),
        engine,
        bucket_bytes=5000,
    )


@pytest.mark.parametrize(
    ("model", "preset"), [("moe", "mxfp8"), ("moe", "nvfp4_experts"), ("dense", "bf16"), ("dense", "fp8_block")]
)
def test_log_probs_are_the_same_bits_after_every_update(model, preset):
    learner, engine = learner_of(model, preset)
    for _ in range(2):
        sync(learner, engine)
        rollouts = engine.generate(requests_of(6, temperature=1.3))
        batch = batch_of(rollouts)
        report = learner.forward_backward(batch)
        assert_same_bytes(report.logp, [r.logp_R for r in rollouts])
        learner.step()
    assert learner.version == 2
    assert engine.version == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 4}], ids=str)
def test_case_M1_the_ratio_is_exactly_one_at_every_temperature_and_truncation(temperature, truncation):
    learner, engine = learner_of("dense", "bf16")
    sync(learner, engine)
    rollouts = engine.generate(requests_of(6, temperature=temperature, **truncation))
    logp = learner.log_probs(batch_of(rollouts))
    assert_same_bytes(logp, [r.logp_R for r in rollouts])
    assert all(bool(torch.isfinite(x).all()) for x in logp)
