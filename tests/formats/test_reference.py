"""Bytes of every own quantizer against a second definition, on every awkward input, along both axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onegrid.formats import QUANTIZERS, decode, elements, quantize, quantize_decode
from onegrid.formats.casts import encode_elements
from onegrid.formats.layouts import unpack
from tests.bytes import assert_same_bytes
from tests.formats import inputs, reference

OWN = [q for name, q in QUANTIZERS.items() if q.source.startswith(("Transformer Engine", "NVIDIA"))]
INPUTS = inputs.named()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(x, q, axis=-1, amax=None):
    """Codes, scales, amax and decoded values, and the fast path, all as bytes."""
    device = x.device
    result = quantize(x, q, axis, amax)
    wide = x.float().cpu().numpy()
    expected = reference.quantize(
        wide, q, axis, None if amax is None else amax.cpu().numpy(), input_max=torch.finfo(x.dtype).max
    )
    codes = result.codes
    if q.fmt.bits == 4:
        codes = unpack(codes, x.shape[axis])
        codes = codes if axis == -1 else codes.transpose(-1, -2).contiguous()
    assert_same_bytes(codes, torch.from_numpy(expected.codes), "codes")
    assert_same_bytes(
        result.scales, torch.from_numpy(np.asarray(expected.scales)).reshape(result.scales.shape), "scales"
    )
    if q.has_amax:
        assert_same_bytes(result.amax, torch.from_numpy(np.asarray(expected.amax)), "amax")
    assert_same_bytes(decode(result), torch.from_numpy(expected.decoded), "decoded")
    fast = quantize_decode(x, q, axis, amax, stats=True)
    assert_same_bytes(fast.values, decode(result), "fast path")
    assert_same_bytes(fast.scales, result.scales)
    assert fast.values.device.type == device.type
    for name in ("nonfinite", "saturated", "overflow"):
        assert int(getattr(fast.stats, name)) == int(getattr(result.stats, name))
    return result


@pytest.mark.parametrize("q", OWN, ids=str)
def test_bytes_follow_the_reference_on_every_awkward_input(q, device):
    for name, x in INPUTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for axis in (-1, -2) if x.numel() < 6000 else (-1,):
                try:
                    check(x.to(dtype).to(device), q, axis)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {dtype}, axis {axis}: {error}") from error


@pytest.mark.parametrize("q", [q for q in OWN if not q.four_over_six], ids=str)
def test_case_Q15_edge_blocks_use_only_real_elements(q, device):
    for rows, columns in zip(inputs.SIZES, inputs.SIZES[3:] + inputs.SIZES[:3], strict=True):
        for shape in ((rows, columns), (columns, rows), (rows, rows)):
            x = inputs.ordinary(*shape).to(device)
            assert decode(check(x, q)).shape == x.shape
    height, width = (size or 1 for size in q.block)
    x = inputs.ordinary(height + 1, width + 3, seed=4).to(device)
    if q.block[1] is not None and q.span != "tensor":
        padded = torch.full((height + 1, 2 * width), 1e4, device=device)
        padded[:, : width + 3] = x
        whole = quantize_decode(x, q, amax=None if q.span == "none" else x.abs().amax(1)).values
        beside = quantize_decode(padded, q, amax=None if q.span == "none" else x.abs().amax(1)).values
        assert_same_bytes(beside[:, :width], whole[:, :width], "full blocks beside padding")


@pytest.mark.parametrize("q", OWN, ids=str)
def test_stacked_experts_are_independent(q, device):
    x_EMK = inputs.ordinary(3, 18, 48).to(device) * torch.tensor([1.0, 30.0, 0.0], device=device)[:, None, None]
    for axis in (-1, -2):
        together = quantize(x_EMK, q, axis)
        for e in range(3):
            alone = quantize(x_EMK[e], q, axis)
            assert_same_bytes(together.codes[e], alone.codes)
            assert_same_bytes(together.scales[e], alone.scales)
            if q.has_amax:
                assert_same_bytes(together.amax[e], alone.amax)
        assert_same_bytes(quantize_decode(x_EMK, q, axis).values, decode(together))


@pytest.mark.parametrize("q", [q for q in OWN if q.block[0] != q.block[1] or q.block[0] is None], ids=str)
def test_columns_are_quantized_as_rows_of_the_transpose(q, device):
    x = inputs.ordinary(70, 33).to(device)
    columns, rows = quantize(x, q, axis=-2), quantize(x.t(), q)
    assert_same_bytes(decode(columns), decode(rows).t())
    assert_same_bytes(columns.scales, rows.scales.t() if rows.scales.dim() else rows.scales)
    assert_same_bytes(columns.codes, rows.codes if q.fmt.bits == 4 else rows.codes.t())


@pytest.mark.parametrize("q", OWN, ids=str)
def test_zero_sign_positive_touches_products_of_exactly_minus_zero_only(q):
    from dataclasses import replace

    x = torch.full((16, 32), 1.0)
    x[:, 3] = -0.0
    x[:, 4] = -1e-14  # underflows to -0
    kept, positive = elements(quantize(x, q)), elements(quantize(x, replace(q, zero_sign="positive")))
    assert kept[0, 3].signbit() and kept[0, 4].signbit() and kept[0, 4] == 0
    assert not positive[0, 3].signbit() and positive[0, 4].signbit()


@pytest.mark.parametrize("q", OWN, ids=str)
def test_every_finite_code_survives_decode_and_encode(q, device):
    codes = q.fmt.finite_codes(device)
    from onegrid.formats.casts import decode_elements

    values = decode_elements(codes, q.fmt)
    assert_same_bytes(encode_elements(values, q.fmt), codes)
