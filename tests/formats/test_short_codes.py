"""Codes in integer passes are the bytes of the definition, or are not made."""

from __future__ import annotations

import pytest
import torch

from onegrid.formats import QUANTIZERS, quantize
from onegrid.formats.short_codes import CHUNK_ELEMENTS, short_codes
from tests.bytes import assert_same_bytes

MX = QUANTIZERS["mxfp8"]


def assert_as_defined(x_MK):
    found, expected = short_codes(x_MK, MX), quantize(x_MK, MX)
    assert found is not None
    assert_same_bytes(found[0], expected.codes)
    assert_same_bytes(found[1], expected.scales)


@pytest.mark.parametrize("largest", [448.0, 1.0, 1.75, 1.7578125, 1.0078125, -3.0, 2.0**-60, 2.0**99])
def test_every_bf16_number_under_a_given_amax_gets_the_code_of_the_definition(largest):
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs().float() <= abs(largest))]
    count = len(numbers) // 31
    tops = torch.full((count, 1), largest, dtype=torch.bfloat16)
    assert_as_defined(torch.cat([numbers[: count * 31].view(-1, 31), tops], 1).contiguous())


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e20, 1e-20])
def test_random_numbers_zeros_and_small_ones_get_the_codes_of_the_definition(scale):
    x_MK = (torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * scale).to(torch.bfloat16)
    x_MK[:, ::7] *= 1e-5
    x_MK[0], x_MK[1] = 0.0, -0.0
    x_MK[2, 32:64] = 0.0
    assert_as_defined(x_MK)


def test_more_than_one_chunk_is_one_matrix():
    x_MK = torch.randn(2 * CHUNK_ELEMENTS // 512 + 3, 512, generator=torch.Generator().manual_seed(2)).to(
        torch.bfloat16
    )
    assert_as_defined(x_MK)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**101, 2.0**-110])
def test_what_the_short_way_does_not_cover_is_left_to_the_definition(bad):
    x_MK = torch.zeros(4, 64).to(torch.bfloat16)
    x_MK[3, 40] = bad
    assert short_codes(x_MK, MX) is None


@pytest.mark.parametrize(
    "x_MK",
    [
        torch.ones(4, 64),
        torch.ones(4, 40).to(torch.bfloat16),
        torch.ones(64, 4).to(torch.bfloat16).T,
        torch.ones(2, 4, 64).to(torch.bfloat16),
        torch.ones(0, 64).to(torch.bfloat16),
    ],
    ids=["fp32", "edge", "strided", "stacked", "empty"],
)
def test_other_shapes_and_types_are_left_to_the_definition(x_MK):
    assert short_codes(x_MK, MX) is None


def test_other_quantizers_are_left_to_the_definition():
    x_MK = torch.ones(128, 128).to(torch.bfloat16)
    covered = [name for name, q in QUANTIZERS.items() if short_codes(x_MK, q) is not None]
    for name in covered:
        q = QUANTIZERS[name]
        assert_same_bytes(short_codes(x_MK, q)[0], quantize(x_MK, q).codes)
    assert "mxfp8" in covered and "nvfp4" not in covered and "mxfp8_floor" not in covered
