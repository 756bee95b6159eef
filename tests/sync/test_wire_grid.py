"""What is sent is the plain grid of the plan, whatever the receiver makes of it (cases W6 and W7)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from onegrid.errors import SyncError
from onegrid.formats import QUANTIZERS
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import preset, resolve
from onegrid.sync import manifest_of, push
from tests.sampler.tiny import DENSE, engine_of, snapshot_of

SIZES = {"hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 1}
GATE = "model.layers.0.mlp.gate_proj.weight"  # 256 x 384
SCALES = {
    "fp8_block": ((2, 3), "float32", 256 * 384),
    "mxfp8": ((256, 12), "uint8", 256 * 384),
    "mxfp4": ((256, 12), "uint8", 256 * 384 // 2),
    "nvfp4_all": ((256, 24), "uint8", 256 * 384 // 2),
    "fp8_row": ((256, 1), "float32", 256 * 384),
    "fp8_tensor": ((), "float32", 256 * 384),
}


@pytest.mark.parametrize("recipe", SCALES)
def test_case_W6_scales_cross_as_the_plain_grid_of_blocks(recipe):
    spec = ModelSpec.from_hf_config(DENSE | SIZES)
    plan = resolve(preset(recipe), DENSE | SIZES, tensor_shapes(spec))
    entry = manifest_of(snapshot_of(spec, plan, 1, version=1)).entries[GATE]
    shape, dtype, num_codes = SCALES[recipe]
    scales, codes = entry.parts["scales"], entry.parts["codes"]
    assert (scales.shape, scales.dtype) == (shape, dtype)
    assert scales.num_bytes == math.prod(shape) * (4 if dtype == "float32" else 1)
    assert (codes.dtype, codes.num_bytes) == ("uint8", num_codes)
    assert entry.shape == (256, 384) and entry.format == plan[GATE].sampler_weight
    assert entry.parts.keys() == {"codes", "scales"} | ({"amax"} if QUANTIZERS[entry.format].has_amax else set())


def test_case_W7_power_of_two_scales_on_one_side_only_are_two_plans_and_one_is_refused():
    """The numbers differ: that is why no side may choose for itself."""
    power = preset("fp8_block")
    change = {"weight": "fp8_128x128_fp32", "activation": "fp8_1x128_fp32", "gradient": "fp8_1x128_fp32"}
    rules = tuple(dataclasses.replace(r, **change) if r.weight else r for r in power.rules)
    spec = ModelSpec.from_hf_config(DENSE)
    plans = [resolve(r, DENSE, tensor_shapes(spec)) for r in (power, dataclasses.replace(power, rules=rules))]
    assert plans[0].digest != plans[1].digest
    assert "fp8_128x128_fp32" in plans[1].table() and "fp8_128x128_fp32" not in plans[0].table()
    one, other = (snapshot_of(spec, plan, 1, version=1) for plan in plans)
    assert not torch.equal(one.tensors[GATE].codes, other.tensors[GATE].codes)
    engine = engine_of("dense", "fp8_block")
    before = engine.digest([GATE])
    for sent in (other, dataclasses.replace(other, plan_digest=plans[0].digest)):
        with pytest.raises(SyncError) as caught:
            push(sent, engine)
        assert caught.value.condition == "C1"
    assert engine.version == 0 and engine.digest([GATE]) == before
    push(one, engine)
    assert engine.version == 1
