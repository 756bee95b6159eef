"""Other people's implementations as judges, where their rule is the same."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from onegrid.formats import E2M1, E4M3, E5M2, QUANTIZERS, format_errors, quantize
from onegrid.formats.casts import encode_elements
from tests.bytes import assert_same_bytes
from tests.formats import inputs
from tests.formats.test_foreign import bf16_blocks


@pytest.mark.parametrize(
    ("fmt", "judge"),
    [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2), (E2M1, ml_dtypes.float4_e2m1fn)],
    ids=str,
)
def test_element_casts_equal_ml_dtypes_within_range(fmt, judge, device):
    every_bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((every_bf16, inputs.scale_boundaries().flatten(), inputs.ordinary(100_000)))
    x = torch.cat((x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)))
    x = x[x.abs() <= fmt.max]
    expected = torch.from_numpy(x.numpy().astype(judge).view(np.uint8).copy())
    assert_same_bytes(encode_elements(x.to(device), fmt), expected)


def test_mxfp8_of_bf16_equals_torchao_rounding_up():
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    for x in (inputs.ordinary(128, 256).bfloat16(), bf16_blocks(20, 240)):
        scales, data = mx.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        for name in ("mxfp8", "mxfp8_rceil"):
            own = quantize(x, QUANTIZERS[name])
            assert_same_bytes(own.scales.flatten(), scales.view(torch.uint8).flatten())
            assert_same_bytes(own.codes.flatten(), data.view(torch.uint8).flatten())


@pytest.mark.parametrize("mode", ["FLOOR", "CEIL", "EVEN"])
def test_the_other_torchao_rules_are_torchaos(mode):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x = torch.cat((bf16_blocks(), torch.zeros(1, 32).bfloat16(), torch.full((1, 32), torch.nan).bfloat16()))
    for wide in (x, x.float()):
        scales, data = mx.to_mx(wide, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode])
        own = quantize(wide, QUANTIZERS[f"mxfp8_{mode.lower()}"])
        assert_same_bytes(own.scales.flatten(), scales.view(torch.uint8).flatten())
        assert_same_bytes(own.codes.flatten() & 0x7F, data.view(torch.uint8).flatten() & 0x7F)


@pytest.fixture(scope="module")
def modelopt():
    """NVIDIA's quantized tensors; their import warns about other libraries' versions, which is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("modelopt.torch.quantization.qtensor", reason="needs nvidia-modelopt")


def test_mxfp8_of_bf16_equals_modelopt(modelopt):
    for x in (inputs.ordinary(128, 256).bfloat16(), bf16_blocks(20, 240)):
        judge, scales = modelopt.MXFP8QTensor.quantize(x)
        own = quantize(x, QUANTIZERS["mxfp8"])
        assert_same_bytes(own.scales.flatten(), scales.flatten())
        assert_same_bytes(own.codes.flatten(), judge._quantized_data.view(torch.uint8).flatten())


def test_the_survey_has_a_row_for_every_quantizer():
    x = inputs.ordinary(64, 256)
    rows = {row.name: row for row in format_errors(x)}
    assert rows.keys() == QUANTIZERS.keys()
    assert rows["mxfp8"].bits_per_element == 8.25 and rows["mxfp8"].block == "1 x 32"
    assert rows["nvfp4"].bits_per_element == pytest.approx(4.5 + 32 / x.numel())
    assert rows["fp8_row"].bits_per_element == 8 + 32 / 256
    # Rounding to m mantissa bits errs by at most 2^-(m+1) of a value; the smallest values err more but weigh little.
    assert all(row.relative_error < 2.0**-4 for row in rows.values() if row.element == "e4m3")
    assert all(0.05 < row.relative_error < 0.25 for row in rows.values() if row.element == "e2m1")
    zero = format_errors(torch.zeros(2, 32), {"mxfp8": QUANTIZERS["mxfp8"]})[0]
    assert zero.relative_error == 0
