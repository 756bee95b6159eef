"""A learner that keeps masters and codes only: every number has the bytes of one that keeps decoded weights too."""

from __future__ import annotations

import pytest

from onegrid.config import load_config
from onegrid.guard.byte_comparison import compare_bytes
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.spec import tensor_shapes
from onegrid.recipe import PRESETS, resolve
from onegrid.study.estimate import memory_estimate
from onegrid.study.parts import design
from tests.bytes import assert_same_bytes
from tests.learner.test_learner import batch_of, weights_of
from tests.rl.tiny import write_tiny_run
from tests.sampler.tiny import MODELS, plan_of

CASES = [
    ("dense", "mxfp8", "dequantized"),
    ("dense", "mxfp8", "quantized"),
    ("moe", "mxfp8", "dequantized"),
    ("moe", "nvfp4_experts", "dequantized"),
    ("dense", "nvfp4_all", "dequantized"),
    ("moe", "fp8_block", "dequantized"),
    ("dense", "fp8_tensor", "dequantized"),
    ("shared", "bf16", None),
]


@pytest.mark.parametrize(("model", "preset", "backward"), CASES)
def test_log_probs_gradients_and_the_next_version_have_the_same_bytes(model, preset, backward, device):
    spec, plan = plan_of(model, preset)
    if backward is not None:
        plan = resolve(PRESETS[preset], MODELS[model], tensor_shapes(spec), backward=backward)
    decoded, codes = (
        Learner(spec, plan, weights_of(model), LearnerConfig(lr=1e-2, weights=weights), device=device)
        for weights in ("decoded", "codes")
    )
    for _ in range(2):
        reports = [learner.forward_backward(batch_of(4)) for learner in (decoded, codes)]
        assert_same_bytes(reports[1].logp, reports[0].logp)
        for key, master in decoded.masters.items():
            assert_same_bytes(codes.masters[key].grad, master.grad, key)
        metrics = [learner.step() for learner in (decoded, codes)]
        for key, master in decoded.masters.items():
            assert_same_bytes(codes.masters[key].detach(), master.detach(), key)
    assert not codes.live.operands and codes.live.num_bytes()["derived"] == 0
    assert metrics[1]["perf/operand_bytes_saved"] == decoded.live.num_bytes()["derived"] == codes.live.saved_bytes
    assert "perf/operand_bytes_saved" not in metrics[0]


def test_the_guard_compares_masters_and_codes_as_before():
    spec, plan = plan_of("moe", "mxfp8")
    learner = Learner(spec, plan, weights_of("moe"), LearnerConfig(weights="codes"))
    assert compare_bytes(learner).status == "passed"
    key = "model.layers.0.self_attn.q_proj.weight"
    learner.live.held[key].codes[0, 0] ^= 1
    found = compare_bytes(learner)
    assert found.status == "failed" and found.tensors == (key,)


def test_another_plan_is_adopted_without_operands_too():
    spec, plan = plan_of("dense", "mxfp8")
    learner = Learner(spec, plan, weights_of("dense"), LearnerConfig(weights="codes"))
    _, bf16 = plan_of("dense", "bf16")
    learner.adopt(bf16)
    assert not learner.live.operands
    want = Learner(spec, bf16, weights_of("dense"), LearnerConfig()).log_probs(batch_of(2))
    assert_same_bytes(learner.log_probs(batch_of(2)), want)


def test_the_estimate_says_what_is_saved(tmp_path):
    toml = write_tiny_run(tmp_path)
    whole = memory_estimate(design(load_config(toml), tmp_path))
    found = memory_estimate(design(load_config(toml, ["learner.weights=codes"]), tmp_path))
    said = next(key for key in found if "one operand at a time" in key)
    assert f"saves {(whole['total'] - found['total']) / 2**20:.1f} MiB" in said
