"""Learner and engine at the widths of real models, where kernels do the work that tiny models never reach: packed
weights, compiled quantizers, one kernel for norm and quantizer, sums of many chunks. All of this needs a GPU."""

from __future__ import annotations

import pytest
import torch

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import PRESETS, resolve
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.study import bench
from onegrid.sync import push
from tests.bytes import assert_same_bytes

VOCABULARY = 4096


def pair(shape: str, preset: str, layers: int, device: torch.device, **settings) -> tuple[Learner, Engine]:
    config = bench.SHAPES[shape] | {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    if "num_experts" in config:
        config |= {"num_experts": 24}  # as wide as they are, and fewer: several of these tests share a GPU
    spec = ModelSpec.from_hf_config(config)
    plan = resolve(PRESETS[preset], config, tensor_shapes(spec))
    learner = Learner(spec, plan, bench.random_tensors(spec, device), LearnerConfig(lr=1e-3), device=device)
    live = LiveWeights(spec, plan, side="sampler", device=device, **settings)
    return learner, Engine(live, SamplerConfig(max_slots=48, max_len=64))


@pytest.mark.parametrize(
    ("shape", "preset"),
    [
        ("qwen3-8b", "bf16"),
        ("qwen3-8b", "mxfp8"),
        ("qwen3-8b", "nvfp4_all"),
        ("qwen3-8b", "fp8_block"),
        ("qwen3-0.6b", "mxfp8"),
        ("qwen3-0.6b", "fp8_row"),
        ("qwen3-30b-a3b", "bf16"),
        ("qwen3-30b-a3b", "mxfp8"),
        ("qwen3-30b-a3b", "nvfp4_experts"),
    ],
)
@pytest.mark.parametrize("capture", [True, False])
def test_log_probs_at_real_widths_are_the_same_bits(shape, preset, capture, gpu):
    learner, engine = pair(shape, preset, 2, gpu)
    if not capture:
        engine.graphs = None
    assert_one_policy(learner, engine)


@pytest.mark.parametrize(
    ("shape", "preset"),
    [
        ("qwen3-8b", "mxfp8"),
        ("qwen3-8b", "nvfp4_all"),
        ("qwen3-8b", "fp8_block"),
        ("qwen3-0.6b", "fp8_row"),
        ("qwen3-30b-a3b", "mxfp8"),
        ("qwen3-30b-a3b", "nvfp4_experts"),
    ],
)
def test_a_sampler_without_operands_is_the_same_policy_at_real_widths(shape, preset, gpu):
    learner, engine = pair(shape, preset, 2, gpu, weights="codes")
    assert_one_policy(learner, engine)
    assert engine.weights.num_bytes()["derived"] == 0


def assert_one_policy(learner: Learner, engine: Engine) -> None:
    """Log-probabilities of two versions have the same bytes on both sides, at several numbers of rows."""
    for update in range(2):
        tensors = learner.canonical()
        push(Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=tensors), engine)
        for count in (1, 17, 48):  # 16, 32 and 48 rows a step
            rollouts = engine.generate(bench.requests(count, prompt=12, new=6, vocab=VOCABULARY))
            batch = bench.batch_of(rollouts)
            for have, rollout in zip(learner.log_probs(batch), rollouts, strict=True):
                assert_same_bytes(have.cpu(), rollout.logp_R, f"{count} sequences, version {update}")
        learner.forward_backward(batch)
        learner.step()


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4_all"])
def test_packed_weights_are_taken_somewhere_and_change_no_bit_of_a_prompt(preset, gpu):
    prompts = [tuple(range(3, 15)), tuple(range(40))]
    answers = []
    for weights in ("auto", "decoded", "codes"):
        learner, engine = pair("qwen3-8b", preset, 1, gpu, weights=weights)
        push(Snapshot(version=0, plan_digest=learner.plan.digest, tensors=learner.canonical()), engine)
        answers.append(engine.probe(prompts))
        if weights != "decoded":
            assert all(choice.same_bytes for choice in engine.weights.packed.choices)
    assert_same_bytes(answers[0], answers[1])
    assert_same_bytes(answers[2], answers[1])
