"""Faults that people met elsewhere, each with its smallest input and the right value."""

from __future__ import annotations

import math

import pytest
import torch

from onegrid.errors import FormatError
from onegrid.formats import (
    E2M1,
    E4M3,
    E5M2,
    QUANTIZERS,
    decode,
    dequantize,
    digest,
    elements,
    pack,
    quantize,
    quantize_decode,
    unpack,
)
from onegrid.formats.casts import decode_elements, e8m0_decode, e8m0_inverse, e8m0_up, encode_elements, round_bf16
from onegrid.formats.scales import global_encode
from tests.bytes import assert_same_bytes
from tests.formats import inputs

ALL = list(QUANTIZERS.values())
OWN = [q for q in ALL if q.source.startswith(("Transformer Engine", "NVIDIA"))]
EXACT_ZERO = [q for q in OWN if q.scale != "e4m3"]


@pytest.mark.parametrize("q", ALL, ids=str)
def test_case_Q1_a_zero_block_gives_finite_codes_and_exact_zeros(q, device):
    one = inputs.one_number().to(device)
    row = inputs.ordinary(4, 64).to(device)
    row[1] = 0
    for x in (one, row, torch.zeros(16, 32, device=device)):
        for axis in (-1, -2):
            result = quantize(x, q, axis)
            values = dequantize(result)
            assert values.isfinite().all()
            assert (values[x == 0] == 0).all()
            if result.scales.dtype == torch.float32:
                assert (result.scales > 0).all() and result.scales.isfinite().all()
    assert dequantize(quantize(one, q))[0, 0].item() == pytest.approx(1, rel=2e-7 if q in OWN else 0.2)


@pytest.mark.parametrize("q", OWN, ids=str)
def test_case_Q1_a_nearly_zero_block_keeps_its_size(q, device):
    x = torch.full((16, 32), 1e-20, device=device)
    assert (dequantize(quantize(x, q)) / 1e-20 - 1).abs().max() < 0.13


def test_case_Q3_overflow_saturates_whatever_the_torch_version(device):
    values = [448, 464, 464.01, 465, 1000, math.inf, math.nan, -1000]
    right = [0x7E] * 6 + [0x7F, 0xFE]
    for dtype in (torch.float32, torch.bfloat16):
        for repeat in (1, 64):  # scalar and vector code
            x = torch.tensor(values, dtype=dtype, device=device).repeat(repeat)
            expected = torch.tensor(right, dtype=torch.uint8).repeat(repeat)
            assert_same_bytes(encode_elements(x, E4M3), expected)
            for i in range(len(values)):
                assert_same_bytes(encode_elements(x[i : i + 1], E4M3), expected[i : i + 1])
    assert_same_bytes(encode_elements(torch.tensor([1e6, 61439.0, -1e6]), E5M2), torch.tensor([123, 123, 251]).byte())


def test_case_Q4_all_bytes_go_round(device):
    codes = torch.arange(256, device=device).to(torch.uint8)
    for fmt, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        values, judge = decode_elements(codes, fmt).cpu(), codes.cpu().view(dtype).float()
        finite = judge.isfinite()
        assert_same_bytes(values[finite], judge[finite])
        assert (values[~finite].isnan() == judge[~finite].isnan()).all()
        assert_same_bytes(encode_elements(values[finite], fmt), codes.cpu()[finite])
    nibbles = torch.arange(16, device=device).to(torch.uint8)
    assert_same_bytes(encode_elements(decode_elements(nibbles, E2M1), E2M1), nibbles)
    bytes_ = torch.arange(255, device=device).to(torch.uint8)
    assert_same_bytes(e8m0_up(e8m0_decode(bytes_)), bytes_)
    assert decode_elements(codes[1:9], E4M3).tolist() == [k / 512 for k in range(1, 9)]
    near = torch.tensor([256.0, 2.0**-10, math.nextafter(2.0**-10, 1) + 2.0**-34])
    assert encode_elements(near, E4M3).tolist() == [0x78, 0, 1]


def test_case_Q5_the_stored_scale_is_the_one_that_divided():
    x = torch.tensor([[560.0, 280.0, 1.0] + [0.0] * 29])
    result = quantize(x, QUANTIZERS["mxfp8"])
    assert e8m0_decode(result.scales).item() == 2
    assert decode(result)[0, :3].tolist() == [576, 288, 1]
    for q in (q for q in OWN if q.scale == "e8m0" and q.block == (1, 32)):
        x = inputs.ordinary(40, 64)
        result = quantize(x, q)
        scale = e8m0_decode(result.scales).repeat_interleave(32, 1)
        assert_same_bytes(elements(result), decode_elements(encode_elements(x / scale, q.fmt), q.fmt))
        large = (x / scale).abs() >= 2.0**q.fmt.min_exponent
        assert ((decode(result) - x).abs()[large] <= x.abs()[large] * 2.0 ** -(q.fmt.mantissa_bits + 1)).all()


def test_case_Q6_powers_of_two_have_their_end_points(device):
    ends = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8, device=device)
    assert e8m0_decode(ends)[:4].tolist() == [2.0**-127, 2.0**-126, 1, 2.0**127]
    assert e8m0_inverse(ends)[:4].tolist() == [2.0**127, 2.0**126, 1, 2.0**-127]
    assert e8m0_decode(ends)[4].isnan() and e8m0_inverse(ends)[4].isnan()
    cases = [(0.0, 0), (2.0**-149, 0), (2.0**-127, 0), (2.0**-127 + 2.0**-149, 1), (1.0, 127), (1.25, 128), (-1.0, 127)]
    cases += [(1.999, 128), (2.0, 128), (3e38, 254), (math.inf, 254), (math.nan, 255)]
    values = torch.tensor([value for value, _ in cases], device=device)
    assert e8m0_up(values).tolist() == [byte for _, byte in cases]
    block = torch.full((1, 32), 1.999)  # by way of BF16 it would be 2 and the floor exponent 1
    assert quantize(block, QUANTIZERS["mxfp8_floor"]).scales.item() == 127 - 8


def test_case_Q7_ties_go_to_even_and_the_first_element_lies_low():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert decode_elements(encode_elements(ties, E2M1), E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    above = torch.nextafter(ties, ties + 1)
    assert decode_elements(encode_elements(above, E2M1), E2M1).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert encode_elements(torch.tensor([6.5, 100.0, math.nan, -0.0]), E2M1).tolist() == [7, 7, 7, 8]
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack(pairs)
    assert (packed[:, 0] == pairs[:, 0] + 16 * pairs[:, 1]).all()
    assert_same_bytes(unpack(packed), pairs)
    odd = torch.arange(1, 16, dtype=torch.uint8)[None]
    assert pack(odd).shape == (1, 8) and pack(odd)[0, -1] == 15
    assert_same_bytes(unpack(pack(odd), 15), odd)
    with pytest.raises(FormatError, match="15 or 16 codes, not 14"):
        unpack(pack(odd), 14)


@pytest.mark.parametrize("q", OWN, ids=str)
def test_case_Q8_what_is_not_finite_is_counted_and_does_not_spoil_the_rest(q, device):
    for bad in (math.nan, math.inf):
        x = torch.ones(32, 32, device=device)
        x[3, 7] = bad
        for axis in (-1, -2):
            result = quantize(x, q, axis)
            assert int(result.stats.nonfinite) == 1
            assert int(quantize_decode(x, q, axis, stats=True).stats.nonfinite) == 1
            if bad != bad:
                others = torch.ones_like(x, dtype=torch.bool)
                others[3, 7] = False
                clean = dequantize(quantize(torch.ones_like(x), q, axis))
                assert_same_bytes(dequantize(result)[others], clean[others])
                expected = math.nan if q.fmt.bits == 8 else q.fmt.max
                assert elements(result)[3, 7].item() == pytest.approx(expected, nan_ok=True)
            else:
                assert int(result.stats.saturated) >= 1
                assert elements(result)[3, 7].item() == q.fmt.max
    assert int(quantize(torch.ones(32, 32), q).stats.nonfinite) == 0


@pytest.mark.parametrize("q", [q for q in ALL if q.has_amax], ids=str)
def test_case_Q9_an_expert_without_tokens_gets_a_finite_scale(q):
    x_EMK = inputs.ordinary(4, 8, 32)
    x_EMK[3] = 0
    result = quantize(x_EMK, q)
    assert result.amax.isfinite().all() and result.factor.isfinite().all() and (result.factor > 0).all()
    assert (dequantize(result)[3] == 0).all()
    assert global_encode(torch.zeros(1), q).item() == 1


@pytest.mark.parametrize("q", [q for q in ALL if q.takes_amax], ids=str)
def test_case_Q11_shards_with_a_given_amax_are_the_whole(q, device):
    x = inputs.ordinary(32, 64).to(device)
    x[0, 0] = 300
    whole = quantize(x, q)
    per_row = q.span == "row"
    amax = x.abs().amax(1) if per_row else x.abs().amax()
    halves = [
        quantize(h, q, amax=a) for h, a in zip(x.split(16), amax.split(16) if per_row else (amax,) * 2, strict=True)
    ]
    assert_same_bytes(torch.cat([h.codes for h in halves]), whole.codes, "rows")
    columns = [quantize(h, q, amax=amax) for h in x.split(32, 1)]
    assert_same_bytes(torch.cat([h.codes for h in columns], 1), whole.codes, "columns")
    assert_same_bytes(torch.cat([decode(h) for h in columns], 1), decode(whole))


def test_case_Q11_one_scale_for_two_shards():
    x, q = torch.tensor([[300.0], [3.3]]), QUANTIZERS["fp8_tensor"]
    values = [dequantize(quantize(row, q, amax=x.abs().amax())).item() for row in x.split(1)]
    assert values == pytest.approx([300, 3.3482143])
    assert_same_bytes(dequantize(quantize(x, q)).flatten(), torch.tensor(values))


def test_case_Q12_gate_and_up_share_one_amax(device):
    gate, up = inputs.ordinary(32, 64).to(device), inputs.ordinary(32, 64, seed=1).to(device) / 7
    q = QUANTIZERS["nvfp4"]
    shared = torch.maximum(gate.abs().amax(), up.abs().amax())
    fused = quantize(torch.cat((gate, up)), q)
    assert_same_bytes(fused.amax, shared)
    alone = [quantize(half, q, amax=shared) for half in (gate, up)]
    assert_same_bytes(torch.cat([half.codes for half in alone]), fused.codes)
    assert_same_bytes(torch.cat([dequantize(half) for half in alone]), dequantize(fused))


def test_case_Q13_the_factor_multiplies():
    x = inputs.ordinary(16, 32)
    result = quantize(x, QUANTIZERS["nvfp4"])
    assert result.factor.item() == pytest.approx(result.amax.item() / 2688, rel=1e-6)
    assert (decode(result) * result.factor - x).norm() / x.norm() < 0.12
    q = quantize(x, QUANTIZERS["fp8_128x128_fp32"])  # "scale" is the decode multiplier in every format
    assert (elements(q) * q.scales - x).norm() / x.norm() < 0.04


def test_case_Q14_the_global_scale_of_every_expert_is_used():
    x_EMK = inputs.ordinary(2, 16, 32) * torch.tensor([0.25, 4.0])[:, None, None]
    for name in ("nvfp4", "nvfp4_row", "nvfp4_2d"):
        error_E = (dequantize(quantize(x_EMK, QUANTIZERS[name])) - x_EMK).norm(dim=(1, 2)) / x_EMK.norm(dim=(1, 2))
        assert (error_E < 0.14).all()


@pytest.mark.parametrize("q", OWN, ids=str)
def test_case_Q15_grids_are_ceil_divided(q):
    for rows, columns in ((200, 300), (17, 64), (64, 129)):
        scales = quantize(inputs.ordinary(rows, columns), q).scales
        height, width = q.block[0] or rows, q.block[1] or columns
        assert tuple(scales.shape) == (() if q.block == (None, None) else (-(-rows // height), -(-columns // width)))


@pytest.mark.parametrize("q", ALL, ids=str)
def test_case_Q17_strides_do_not_matter(q, device):
    w = inputs.ordinary(40, 48).to(device)
    for view in (w.t(), w[:, ::2], w[:1].expand(8, 48), w[1:, 1:], w.unflatten(1, (3, 16)).transpose(0, 1)):
        one, other = quantize(view, q), quantize(view.contiguous(), q)
        assert_same_bytes(one.codes, other.codes)
        assert_same_bytes(one.scales, other.scales)
        assert_same_bytes(quantize_decode(view, q).values, quantize_decode(view.contiguous(), q).values)
    assert w.equal(inputs.ordinary(40, 48).to(device)), "the input was overwritten"


@pytest.mark.parametrize("q", ALL, ids=str)
def test_case_Q18_zero_tokens_are_an_input(q, device):
    for shape in ((0, 128), (128, 0), (0, 0), (3, 0, 32), (0, 4, 32)):
        x = torch.empty(shape, device=device)
        for axis in (-1, -2):
            result = quantize(x, q, axis)
            assert result.codes.numel() == 0
            assert decode(result).shape == x.shape and dequantize(result).shape == x.shape
            assert quantize_decode(x, q, axis).values.shape == x.shape
            assert result.scales.isfinite().all()
            assert isinstance(digest(result), int)
    assert quantize(torch.empty(0, 128), QUANTIZERS["mxfp8"]).scales.shape == (0, 4)


def test_case_Q21_rounding_to_bf16_is_not_truncation():
    x = inputs.ordinary(100_000)
    assert_same_bytes(round_bf16(x), x.bfloat16().float())
    assert abs(((round_bf16(x).abs() - x.abs()) / x.abs()).mean().item()) < 5e-5  # truncation: -2.8e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.ones(2, 2, dtype=torch.int32), QUANTIZERS["mxfp8"]), "int32; allowed are float32"),
        (lambda: quantize(torch.ones(2), QUANTIZERS["mxfp8"]), "at least two axes"),
        (lambda: quantize(torch.ones(2, 2), QUANTIZERS["mxfp8"], axis=0), "axis 0; the contraction axis is -1 or -2"),
        (lambda: quantize(torch.ones(2, 2), QUANTIZERS["mxfp8"], amax=torch.ones(())), "takes no amax"),
        (lambda: quantize(torch.ones(2, 2), QUANTIZERS["nvfp4_row"], amax=torch.ones(())), r"needed \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(FormatError, match=message):
        call()
