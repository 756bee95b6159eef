"""Native FP8 products: codes of the definition, sums within a bound, rows that stand alone. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from onegrid.errors import CapabilityError
from onegrid.formats import QUANTIZERS, quantize
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.ops.native import (
    decoded_values,
    native_matmul,
    native_operand,
    native_operand_of,
    native_operands,
    transposed,
)
from onegrid.recipe import PRESETS, resolve
from onegrid.recipe.recipe import recipe_from_dict
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import DENSE

WIDE = DENSE | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
PAIRS = [("fp8_tensor", "fp8_tensor"), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")]
PAIRS += [("fp8_1x128_fp32", "fp8_128x128_fp32")]


def plan_of(preset: str, **settings: str):
    recipe = recipe_from_dict({"preset": preset, "matmul": "native", **settings})
    return ModelSpec.from_hf_config(WIDE), resolve(recipe, WIDE, tensor_shapes(ModelSpec.from_hf_config(WIDE)))


def test_a_native_plan_is_another_policy_and_says_so():
    spec, native = plan_of("fp8_block")
    grid = resolve(PRESETS["fp8_block"], WIDE, tensor_shapes(spec))
    assert native.digest != grid.digest and native.exact
    assert any("native" in line for line in native.summary())
    assert type(native).from_json(native.to_json()).matmul == "native"


@pytest.mark.parametrize("preset", ["fp8_block", "mxfp8"])
def test_where_nothing_is_native_a_native_plan_is_refused_by_tensor(preset, device):
    spec, plan = plan_of(preset)
    if device.type == "cuda" and preset == "fp8_block":
        pytest.skip("covered there")
    weights = {name: torch.zeros(shape) for name, shape in tensor_shapes(spec).items()}
    with pytest.raises(CapabilityError, match=r"q_proj.*(Hopper|no native)"):
        Learner(spec, plan, weights, LearnerConfig(), device=device)


def awkward(rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).mul_(3).bfloat16()
    x[0, :200], x[1, 5], x[2, 7], x[3, 9] = 0.0, torch.inf, -0.0, torch.nan
    x[4] = torch.arange(width).to(torch.int16).view(torch.bfloat16)  # zeros and subnormal numbers
    x[5] *= 2.0**100
    x[6, 128:256] = torch.tensor([448.0, 464.0, 464.1, 1.75 * 2.0**-8] * 32)
    return x.cuda()


@pytest.mark.parametrize("name", ["fp8_1x128", "fp8_1x128_fp32"])
def test_blocks_of_both_directions_have_the_bytes_of_the_definition(name, gpu):
    for rows, width in ((128, 512), (256, 1024)):
        x = awkward(rows, width)
        for found, axis in zip(native_operands(x, QUANTIZERS[name]), (-1, -2), strict=True):
            want = quantize(x, QUANTIZERS[name], axis=axis)
            codes, scales = (want.codes, want.scales) if axis == -1 else (want.codes.mT, want.scales.mT)
            assert_same_bytes(found.values.view(torch.uint8), codes.contiguous(), f"{axis}")
            assert_same_bytes(found.block.contiguous(), scales.contiguous(), f"scales {axis}")
    odd = awkward(128, 512)[:77]
    found, want = native_operand(odd, QUANTIZERS[name]), quantize(odd, QUANTIZERS[name])
    assert_same_bytes(found.values.view(torch.uint8), want.codes)


@pytest.mark.parametrize(("activation", "weight"), PAIRS)
def test_native_products_are_near_those_of_the_grid_and_rows_stand_alone(activation, weight, gpu):
    x = torch.randn(300, 1024, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    w = torch.randn(512, 1024, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    b = native_operand_of(quantize(w, QUANTIZERS[weight]))
    a = native_operand(x, QUANTIZERS[activation])
    out = native_matmul(a, b)
    want = decoded_values(a).double() @ decoded_values(b).double().mT
    # numerics.md, section 9.3: some 1e-4 of the sum with promotion every 128; BF16 rounds by 2^-9.
    assert (out.double() - want).norm() <= 2.0**-8 * want.norm()
    if activation == "fp8_tensor":
        return  # one scale spans the rows: nothing is promised
    for rows in (1, 2, 3, 16, 17, 130):
        assert_same_bytes(native_matmul(native_operand(x[:rows], QUANTIZERS[activation]), b), out[:rows], f"{rows}")
        last = native_matmul(native_operand(x[-rows:], QUANTIZERS[activation]), b)
        assert_same_bytes(last, out[-rows:], f"last {rows}")


def test_a_transpose_holds_the_same_numbers(gpu):
    w = torch.randn(512, 1024, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    for name in ("fp8_128x128", "fp8_tensor"):
        o = native_operand_of(quantize(w, QUANTIZERS[name]))
        assert_same_bytes(decoded_values(transposed(o)).mT.contiguous(), decoded_values(o))


@pytest.mark.parametrize("preset", ["fp8_block", "fp8_tensor"])
def test_native_gradients_are_near_those_of_the_grid_and_the_same_every_time(preset, gpu):
    from tests.learner.test_learner import batch_of

    batch, found = batch_of(), {}
    generator = torch.Generator().manual_seed(0)
    spec, native = plan_of(preset)
    grid = resolve(PRESETS[preset], WIDE, tensor_shapes(spec))
    weights = {
        name: torch.randn(shape, generator=generator) * 0.03 + (len(shape) == 1)
        for name, shape in tensor_shapes(spec).items()
    }
    plain = resolve(PRESETS["bf16"], WIDE, tensor_shapes(spec))
    for name, plan in (("native", native), ("again", native), ("grid", grid), ("bf16", plain)):
        learner = Learner(spec, plan, weights, LearnerConfig(), device=gpu)
        learner.forward_backward(batch)
        found[name] = {key: master.grad for key, master in learner.masters.items()}
    for key, grad in found["native"].items():
        assert_same_bytes(found["again"][key], grad, key)
        # Sums that differ in the 13th bit move some operands to a neighbouring code, and these move others: two such
        # passes are nearly as far from each other as from BF16. No further from it than the grid's, then.
        native_error, grid_error = ((found[name][key] - found["bf16"][key]).norm() for name in ("native", "grid"))
        assert native_error <= 1.25 * grid_error, key
