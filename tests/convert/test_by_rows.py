"""A weight in pieces of rows is the weight, byte for byte."""

from __future__ import annotations

import pytest
import torch

from onegrid.convert import by_rows
from onegrid.errors import NonFiniteError
from onegrid.formats import QUANTIZERS, dequantize, quantize
from tests.bytes import assert_same_bytes

SHAPES = [(0, 64), (1, 32), (128, 64), (129, 48), (300, 32), (513, 2048)]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_pieces_of_rows_give_the_bytes_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(by_rows, "PIECE", 1 << 12)
    quantizer = QUANTIZERS[name]
    for shape in SHAPES if quantizer.fmt.name != "e5m2" else SHAPES[:4]:
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 3).bfloat16()
        whole, pieces = quantize(x, quantizer), by_rows.quantize_by_rows(x, quantizer, None)
        assert pieces.shape == whole.shape
        for part in ("codes", "scales", "amax", "factor"):
            if getattr(whole, part) is not None:
                assert_same_bytes(getattr(pieces, part), getattr(whole, part), f"{part} of {shape}")
        assert_same_bytes(by_rows.dequantize_by_rows(pieces, torch.bfloat16), dequantize(whole, torch.bfloat16))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_found_and_counted(bad):
    x = torch.zeros(300, 40).bfloat16()
    by_rows.require_finite("w", x)
    x[299, 39] = bad
    with pytest.raises(NonFiniteError, match="w has 1 NaN or Inf among 12000"):
        by_rows.require_finite("w", x)
    assert float(by_rows.largest(torch.tensor([[-3.0, 2.0]]))) == 3.0
