"""The short way to MX values gives the bytes of the definition, or says that it does not cover an input."""

from __future__ import annotations

import pytest
import torch

from onegrid.formats import QUANTIZERS, decode, quantize, quantize_decode
from onegrid.formats.short import short_values
from tests.bytes import assert_same_bytes
from tests.formats import inputs

MX = ["mxfp8", "mxfp8_e5m2", "mxfp4"]


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ordinary_numbers_have_the_bytes_of_the_definition(name, dtype):
    for x in (inputs.ordinary(96, 256), inputs.ordinary(7, 32) * 1e-20, inputs.ordinary(64, 64) * 3e17):
        x = x.to(dtype)
        x[0] = 0.0
        x[1, ::3] = -0.0
        x[2, :] = -x[2, :].abs() * 1e-4  # underflow to zero keeps the sign
        values = short_values(x, QUANTIZERS[name])
        assert values is not None
        assert_same_bytes(values, decode(quantize(x, QUANTIZERS[name])))


@pytest.mark.parametrize("name", MX)
def test_significands_of_block_maxima_take_the_same_power_of_two(name):
    every = torch.arange(0x3F800000, 0x40000000, 251, dtype=torch.int32).view(torch.float32)
    edge = QUANTIZERS[name].fmt.max
    near = torch.tensor([edge, edge / 2, edge * 2]).view(torch.int32)
    near = torch.cat([near + step for step in range(-2, 3)]).view(torch.float32)
    for amax in (every, near):
        x = torch.zeros(len(amax), 32)
        x[:, 5], x[:, 6] = amax, -amax / 3
        values = short_values(x, QUANTIZERS[name])
        assert values is not None
        assert_same_bytes(values, decode(quantize(x, QUANTIZERS[name])))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 2.0**101, 2.0**-101])
def test_what_it_does_not_cover_is_left_to_the_definition(bad):
    x = inputs.ordinary(4, 64)
    x[1, 32:] = 0.0
    x[1, 40] = bad
    assert short_values(x, QUANTIZERS["mxfp8"]) is None
    assert short_values(inputs.ordinary(4, 48), QUANTIZERS["mxfp8"]) is None
    assert short_values(inputs.ordinary(4, 64), QUANTIZERS["nvfp4_row"]) is None
    assert short_values(torch.zeros(0, 64), QUANTIZERS["mxfp8"]) is None


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("shape", [(64, 96), (3, 32, 40), (2, 3, 96, 7), (4096, 48)])
def test_blocks_down_the_columns_have_the_bytes_and_the_layout_of_the_definition(name, shape):
    x = inputs.ordinary(*shape).to(torch.bfloat16)
    x[..., 1, :] = -0.0
    x[..., 32:64, 2] = 0.0
    values = short_values(x, QUANTIZERS[name], -2)
    want = quantize_decode(x, QUANTIZERS[name], axis=-2).values
    assert_same_bytes(values, want)
    assert values.stride() == want.stride()
    assert short_values(x.mT, QUANTIZERS[name], -2) is None  # not laid out row by row
    assert short_values(x[..., :31, :].contiguous(), QUANTIZERS[name], -2) is None
