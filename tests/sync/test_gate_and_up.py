"""Gate and up keep their places from file to sampler and back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from onegrid.formats import QuantTensor, dequantize
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.spec import tensor_shapes
from onegrid.model.weights import load_weights, save_weights
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from tests.sampler.tiny import plan_of


def constant(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    value = 1.0 if "gate_proj" in name else 2.0 if "up_proj" in name else 0.5
    return torch.full(shape, value, dtype=torch.bfloat16)


@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4_experts", "fp8_block"])
@pytest.mark.parametrize("packed", [False, True], ids=["per expert", "packed"])
def test_case_C4_gate_and_up_keep_their_slots_through_load_sync_shard_and_export(preset, packed, tmp_path):
    spec, plan = plan_of("moe", preset)
    tensors = {name: constant(name, shape) for name, shape in tensor_shapes(spec).items()}
    if packed:
        for layer in spec.moe_layers:
            at = f"model.layers.{layer}.mlp.experts"
            part = {
                p: [tensors.pop(f"{at}.{e}.{p}_proj.weight") for e in range(spec.num_experts)]
                for p in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(part["gate"], part["up"], strict=True)]
            tensors |= {f"{at}.gate_up_proj": torch.stack(both), f"{at}.down_proj": torch.stack(part["down"])}
    save_file(tensors, tmp_path / "model.safetensors")
    learner = Learner(spec, plan, load_weights(tmp_path, spec), LearnerConfig())
    engine = Engine(LiveWeights(spec, plan, side="sampler"), SamplerConfig(max_len=16))
    push(Snapshot(version=0, plan_digest=plan.digest, tensors=learner.canonical()), engine, bucket_bytes=777)
    save_weights({n: t.bfloat16() for n, t in learner.tensors().items()}, spec, tmp_path / "out")
    exported = load_weights(tmp_path / "out", spec)
    for name, shape in tensor_shapes(spec).items():
        want = constant(name, shape).float()
        held = engine.weights.canonical(name)
        values = dequantize(held) if isinstance(held, QuantTensor) else held.float()
        assert torch.allclose(values, want, rtol=2**-6), name  # NVFP4 has a global factor that rounds
        assert torch.equal(exported[name].float(), want), name
        if "gate_proj" in name or "up_proj" in name:
            for shard in values.chunk(2):  # every rank of a tensor-parallel sampler gets rows of both
                assert torch.allclose(shard, want[: len(shard)], rtol=2**-6)
