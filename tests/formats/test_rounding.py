"""Stochastic rounding takes its bits as an argument and is unbiased over them."""

from __future__ import annotations

import pytest
import torch

from onegrid.errors import FormatError
from onegrid.formats import QUANTIZERS, decode, elements, quantize, quantize_decode
from onegrid.formats.rounding import round_stochastic
from tests.bytes import assert_same_bytes
from tests.formats import inputs


def test_the_mean_over_all_random_bits_is_the_value(device):
    values = (torch.arange(0, 6 * 512 + 1, device=device) / 512.0)[:, None]
    bits = torch.arange(256, device=device)[None].expand(len(values), 256)
    mean = round_stochastic(values.expand(-1, 256), bits).double().mean(1)
    step = torch.where(values < 2, 0.5, torch.where(values < 4, 1.0, 2.0))[:, 0]
    assert ((mean - values[:, 0]).abs() <= step / 256).all(), "256 draws resolve the distance to 1/256 of a step"
    assert_same_bytes(round_stochastic(values, torch.zeros_like(values)) <= values, torch.ones_like(values).bool())


def test_values_on_the_grid_do_not_move():
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[:, None].expand(8, 256)
    assert_same_bytes(round_stochastic(grid, torch.arange(256).expand(8, 256)), grid.contiguous())
    beyond = torch.tensor([[6.5, 1e30, float("inf")]])
    assert (round_stochastic(beyond, torch.full((1, 3), 255)) == 6).all()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_row", "mxfp4"])
def test_equal_bits_give_equal_bytes_and_scales_stay(name, device):
    x = inputs.ordinary(20, 40).to(device)
    bits = torch.randint(0, 256, x.shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8).to(device)
    for axis in (-1, -2):
        one, other = (quantize(x, QUANTIZERS[name], axis, random_bits=bits) for _ in range(2))
        assert_same_bytes(one.codes, other.codes)
        assert_same_bytes(one.scales, quantize(x, QUANTIZERS[name], axis).scales)
        assert_same_bytes(quantize_decode(x, QUANTIZERS[name], axis, random_bits=bits).values, decode(one))
        assert not elements(one).equal(elements(quantize(x, QUANTIZERS[name], axis)))


def test_random_bits_that_do_not_fit_are_refused():
    for name, bits in (("mxfp8", torch.zeros(2, 32)), ("nvfp4", torch.zeros(32))):
        with pytest.raises(FormatError, match="one byte per element"):
            quantize(torch.ones(2, 32), QUANTIZERS[name], random_bits=bits)
