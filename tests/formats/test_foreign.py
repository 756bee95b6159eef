"""Where the rules of other engines agree with the project's, and exactly where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onegrid.formats import QUANTIZERS, decode, dequantize, elements, quantize
from onegrid.formats.foreign import RULES as FOREIGN
from onegrid.formats.layouts import unpack
from tests.bytes import assert_same_bytes
from tests.formats import inputs


def bf16_blocks(low: int = 1, high: int = 255) -> torch.Tensor:
    """[N, 32] BF16 blocks, one per positive BF16 amax whose biased exponent lies in [low, high)."""
    amax = torch.arange(low << 7, high << 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = amax[:, None].float() * torch.linspace(-1, 1, 32)
    x[:, 3] = amax.float()
    return x.bfloat16()


def significand(x_NK: torch.Tensor) -> torch.Tensor:
    return torch.frexp(x_NK.float().abs().amax(1)).mantissa * 2


def scales(name: str, x_NK: torch.Tensor) -> torch.Tensor:
    return quantize(x_NK, QUANTIZERS[name]).scales[:, 0].int()


def test_every_rule_is_used_by_a_row_and_every_row_has_a_rule():
    from onegrid.formats.quantize import RULES

    assert {q.rule for q in QUANTIZERS.values()} == set(RULES)
    assert set(FOREIGN) <= set(RULES)


@pytest.mark.parametrize("name", ["mxfp8_rceil", "mxfp8_vllm", "mxfp8_modelopt", "mxfp8_sglang", "mxfp8_flashinfer"])
def test_mxfp8_rules_that_agree_on_bf16_do(name, device):
    x = bf16_blocks(16, 254).to(device)
    one, other = quantize(x, QUANTIZERS[name]), quantize(x, QUANTIZERS["mxfp8"])
    assert_same_bytes(one.scales, other.scales)
    assert_same_bytes(one.codes, other.codes)


@pytest.mark.parametrize(
    ("name", "differs", "by"),
    [
        ("mxfp8_floor", lambda m: m > 1.75, -1),
        ("mxfp8_ceil", lambda m: (m > 1) & (m <= 1.75), 1),
        ("mxfp8_even", lambda m: (m > 1.75) & (m < 1.9375), -1),
        ("mxfp8_compressed_tensors", lambda m: m == 1.75, 1),
        ("mxfp4_floor", lambda m: m > 1.5, -1),
        ("mxfp4_rceil", lambda m: m > 2, 0),
    ],
)
def test_mx_scales_differ_exactly_where_the_rule_says(name, differs, by):
    x = bf16_blocks(16, 254)
    own = scales("mxfp8" if name.startswith("mxfp8") else "mxfp4", x)
    assert_same_bytes(scales(name, x) - own, differs(significand(x)).int() * by)


def test_tiny_blocks_are_treated_in_four_ways():
    x = torch.full((1, 32), 2.0**-130)
    assert quantize(x, QUANTIZERS["mxfp8"]).scales.item() == 0
    assert quantize(x, QUANTIZERS["mxfp8_sglang"]).scales.item() == 1
    assert dequantize(quantize(x, QUANTIZERS["mxfp8"]))[0, 0] == 2.0**-130
    assert (elements(quantize(x, QUANTIZERS["mxfp8_flashinfer"])) == 0).all()
    assert quantize(x, QUANTIZERS["mxfp8_deepgemm"]).scales.item() == 105  # 1e-4 / 448 rounded up is 2^-22


def test_a_nan_spoils_its_block_where_the_rule_says_so():
    x = torch.ones(1, 64)
    x[0, 3] = torch.nan
    spoiled = decode(quantize(x, QUANTIZERS["mxfp8_floor"]))
    assert spoiled[0, :32].isnan().all() and (spoiled[0, 32:] == 1).all()
    largest = elements(quantize(x, QUANTIZERS["mxfp8_flashinfer"]))
    assert largest[0, 3] == 448


def test_ties_of_mxfp4_break_three_ways():
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.0] + [0.0] * 22])
    rows = {name: elements(quantize(ties, QUANTIZERS[name]))[0, :10].tolist() for name in QUANTIZERS if "mxfp4" in name}
    assert rows["mxfp4"] == [0, 1, 1, 2, 2, 4, 4, 6, 0, 0]
    assert rows["mxfp4_triton"] == [0.5, 1, 1.5, 2, 3, 4, 6, 6, -0.5, 0]
    assert rows["mxfp4_modelopt"] == rows["mxfp4_deepgemm"] == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, 0]
    codes = unpack(quantize(ties, QUANTIZERS["mxfp4_deepgemm"]).codes)
    assert (codes[0, 8:10] == 0).all(), "that rule has no -0"


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n.startswith("nvfp4_") and QUANTIZERS[n].rule in FOREIGN])
def test_nvfp4_rules_differ_from_the_projects_in_few_scales_only(name, device):
    x = inputs.ordinary(256, 512).bfloat16().to(device)
    own = quantize(x, QUANTIZERS["nvfp4_row" if QUANTIZERS[name].span == "row" else "nvfp4"])
    other = quantize(x, QUANTIZERS[name])
    share = (own.scales != other.scales).float().mean().item()
    assert share < 0.02
    if name.startswith("nvfp4_flashinfer_exact"):
        assert_same_bytes(other.codes, own.codes)
    if name in ("nvfp4_vllm", "nvfp4_torchao", "nvfp4_modelopt"):
        assert share > 0, "another order of roundings must show on 8192 blocks"


def test_underflowed_nvfp4_blocks_are_treated_in_two_ways():
    x = torch.full((1, 32), 1e-9)
    x[0, :16] = 1
    own, fast = (elements(quantize(x, QUANTIZERS[name])) for name in ("nvfp4", "nvfp4_flashinfer"))
    assert (own[0, 16:] == 6).all() and (fast[0, 16:] == 0).all()
    assert (decode(quantize(x, QUANTIZERS["nvfp4"]))[0, 16:] == 0).all()


def test_fp8_blocks_agree_for_powers_of_two_and_differ_by_one_ulp_else():
    x = torch.cat([inputs.ordinary(128, 128, seed=i).bfloat16() for i in range(32)])
    assert_same_bytes(
        quantize(x, QUANTIZERS["fp8_128x128_deepgemm"]).codes, quantize(x, QUANTIZERS["fp8_128x128"]).codes
    )
    own = quantize(x, QUANTIZERS["fp8_128x128_fp32"]).scales
    for name in ("fp8_128x128_fp32_deepgemm", "fp8_128x128_fp32_nemo_rl"):
        other = quantize(x, QUANTIZERS[name]).scales
        assert (own != other).sum() > 0 and (own.view(torch.int32) - other.view(torch.int32)).abs().max() == 1
    zero = torch.zeros(128, 128)
    assert quantize(zero, QUANTIZERS["fp8_128x128_deepgemm"]).scales.item() == 2.0**-22
    assert quantize(zero, QUANTIZERS["fp8_128x128"]).scales.item() == 1


def test_power_of_two_fp8_scales_are_the_mxfp8_rule():
    x = bf16_blocks(16, 240).repeat(1, 4)
    block = quantize(x, QUANTIZERS["fp8_1x128"]).scales
    mx = quantize(x, replace(QUANTIZERS["mxfp8"], block=(1, 128))).scales
    assert_same_bytes((block.view(torch.int32) >> 23).to(torch.uint8), mx)
