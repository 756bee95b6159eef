"""The kernel that decodes codes and scales has the bytes of the definition. All of this needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onegrid.formats import QUANTIZERS, decode, elements, quantize
from onegrid.ops import operand
from onegrid.ops.operand import operand_of
from tests.bytes import assert_same_bytes

SHAPES = [(16, 32), (48, 256), (3, 32, 128), (256, 384), (2, 256, 1024)]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_any_codes_and_scales_decode_to_the_bytes_of_the_definition(name, gpu):
    from onegrid.ops import decode_triton

    quantizer, generator, covered = QUANTIZERS[name], torch.Generator().manual_seed(0), 0
    for shape in SHAPES:
        q = quantize(torch.randn(shape, generator=generator).to(gpu), quantizer)
        codes = torch.randint(0, 256, q.codes.shape, dtype=torch.uint8, generator=generator).to(gpu)
        scales = q.scales
        if scales.dtype == torch.uint8:  # NaN, subnormal numbers and all that overflows
            scales = torch.randint(0, 256, q.scales.shape, dtype=torch.uint8, generator=generator).to(gpu)
        q = replace(q, codes=codes, scales=scales.contiguous())
        if not decode_triton.covers(q):
            continue
        covered += 1
        want = decode(q) if quantizer.matmul in ("decoded", "nvfp4") else elements(q)
        assert_same_bytes(decode_triton.values(q), want.to(torch.bfloat16), f"{name} {shape}")
        assert_same_bytes(operand_of(q).values, want.to(torch.bfloat16))
    assert covered


def test_blocks_that_are_not_whole_are_left_to_the_definition(gpu, monkeypatch):
    from onegrid.ops import decode_triton

    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)).to(gpu)
    for name in ("mxfp8", "nvfp4", "fp8_128x128"):
        q = quantize(x, QUANTIZERS[name])
        assert not decode_triton.covers(q)
        assert not decode_triton.covers(quantize(x[:32, :192], QUANTIZERS[name], axis=-2))
        found = operand_of(q).values
        monkeypatch.setattr(operand, "has_triton", lambda: False)
        assert_same_bytes(found, operand_of(q).values)
        monkeypatch.undo()
