"""Quantize and decode on NVIDIA GPUs behind a norm, behind SwiGLU and along columns, in one pass, with the bytes of the
definition in `formats`.

A tile is [blocks, width of a block]; what a rule does with it is written once, in `_values`. Rounding adds and takes
away a power of two, as in `formats.casts`; nothing is contracted, because a clamp or a store lies between a product
and the next sum. Divisions are `div_rn`. Values are exact in BF16, so the result is BF16.
"""

import triton
import triton.language as tl
from torch import Tensor, bfloat16, float32

from onegrid.formats import Quantizer
from onegrid.ops.arranged import room
from onegrid.ops.early import begin, options
from onegrid.ops.fused_triton import gated, normed, warps_of, whole_rows
from onegrid.ops.quantize_cuda import RULES as _RULES
from onegrid.ops.quantize_cuda import is_plain

_FLT_MAX = tl.constexpr(3.4028234663852886e38)


def covers(quantizer: Quantizer) -> bool:
    """Whether `residual_norm` and `swiglu` know the rule: MX, NVFP4 per row, FP8 1 x 128 with power-of-two scales."""
    return is_plain(quantizer) and (quantizer.rule == "mx" or quantizer.pow2 or quantizer.span == "row")


def covers_columns(x_MK: Tensor, quantizer: Quantizer) -> bool:
    """Whether `columns` gives `quantize_decode(x_MK, quantizer, axis=-2)`: MX and FP8 rules, whole blocks."""
    return (
        covers(quantizer)
        and quantizer.rule != "nvfp4"
        and x_MK.dim() == 2
        and x_MK.numel() > 0
        and x_MK.dtype in (bfloat16, float32)
        and x_MK.shape[0] % (quantizer.block[1] or 1) == 0
    )


@triton.jit
def _round(magnitude, MAX: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """`casts.round_magnitude_`."""
    magnitude = tl.minimum(magnitude, MAX)
    anchor = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor = tl.maximum(anchor * (2.0 ** (23 - MANTISSA)), 2.0 ** (MIN_EXPONENT + 23 - MANTISSA))
    return (magnitude + anchor) - anchor


@triton.jit
def _largest(x):
    """|x| and, without NaN, as what an amax is taken of."""
    magnitude = tl.abs(x)
    return magnitude, tl.where(magnitude == magnitude, magnitude, 0.0)


@triton.jit
def _mx_scales(amax, RECIPROCAL: tl.constexpr):
    """FP32 multipliers of `scales.mx`: encode, decode."""
    bits = (amax * RECIPROCAL).to(tl.int32, bitcast=True)
    byte = tl.minimum(((bits - 1) >> 23) + 1, 254)
    byte = tl.where(bits <= 0x400000, 0, byte)
    encode = tl.maximum((254 - byte) << 23, 0x00400000).to(tl.float32, bitcast=True)
    return encode, tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_scales(amax, MAX: tl.constexpr):
    """`scales.fp8_block` with power-of-two scales; an infinite quotient becomes 2^127."""
    encode = tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax)
    bits = tl.minimum(encode.to(tl.int32, bitcast=True), 0x7F7FFFFF) & 0x7F800000
    inside = (amax > 0) & (amax < float("inf"))
    encode = tl.where(inside, bits.to(tl.float32, bitcast=True), 1.0)
    return encode, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)


@triton.jit
def _nvfp4_scales(amax, row_amax):
    """`scales.nvfp4`: what elements are multiplied by, and the E4M3 block value. `row_amax` is one number."""
    encode = tl.div_rn(tl.full(row_amax.shape, 2688.0, tl.float32), row_amax)
    encode = tl.minimum(encode, _FLT_MAX)
    encode = tl.where((row_amax == 0) | (encode == 0), 1.0, encode)
    decode = tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)
    block = _round(tl.minimum(amax * (encode * 0.1666666716337204), _FLT_MAX), 448.0, 3, -6)
    enc = tl.minimum(tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), block * decode), _FLT_MAX)
    return enc, block


@triton.jit
def _element(x, magnitude, encode, decode, FOUR: tl.constexpr):
    """BF16 of rounded x times encode, times decode, with x's sign; NaN stays NaN, or is +6 in E2M1."""
    scaled = magnitude * encode
    sign = tl.where(x == x, x.to(tl.int32, bitcast=True) & -2147483648, 0)
    if FOUR:
        scaled = tl.where(scaled == scaled, scaled, float("inf"))
        bits = (_round(scaled, 6.0, 1, 0) * decode).to(tl.int32, bitcast=True)
    else:
        bits = (_round(scaled, 448.0, 3, -6) * decode).to(tl.int32, bitcast=True)
    value = (bits | sign).to(tl.float32, bitcast=True).to(tl.bfloat16)
    if not FOUR:  # the NaN that the chip's own cast to BF16 gives
        value = tl.where(x == x, value.to(tl.int16, bitcast=True), 0x7FFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def _values(x, AXIS: tl.constexpr, RULE: tl.constexpr, FOUR: tl.constexpr, BLOCKS: tl.constexpr):
    """BF16 values of an FP32 tile whose axis AXIS is a block each, and the largest of all (for NVFP4: of the row)."""
    magnitude, finite = _largest(x)
    amax = tl.max(finite, AXIS)
    row = amax
    if RULE == 0:
        encode, decode = _mx_scales(amax, 0.1666666716337204 if FOUR else 0.002232142956927418708801269531)
    elif RULE == 1:
        encode, decode = _fp8_scales(amax, 448.0)
    else:
        row = tl.max(amax, 0)
        encode, decode = _nvfp4_scales(amax, row)
    encode, decode = tl.expand_dims(encode, AXIS), tl.expand_dims(decode, AXIS)
    return _element(x, magnitude, encode, decode, FOUR), row


@triton.jit
def _columns(x, out, K, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr, FOUR: tl.constexpr):
    """Blocks along the first axis of [M, K]."""
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    inside = (column < K)[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values, _ = _values(tile, 0, RULE, FOUR, COLUMNS)
    tl.store(out + at, values, mask=inside)


@triton.jit
def _arrange(to, values, row, rows, width, BLOCK: tl.constexpr):
    """Stores a row in the order of `ops.arranged`, eight even or odd numbers at once."""
    step, odd, k = (
        tl.arange(0, BLOCK // 16)[:, None, None],
        tl.arange(0, 2)[None, :, None],
        tl.arange(0, 8)[None, None, :],
    )
    turned = tl.permute(tl.reshape(values, [BLOCK // 16, 8, 2]), (0, 2, 1))
    tl.store(to + step * (rows * 16) + odd * (rows * 8) + row * 8 + k, turned, mask=step * 16 < width)


@triton.jit
def _norm(
    x, y, weight, total, out, arranged, amax, stride_x, stride_y, eps, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, RULE: tl.constexpr, FOUR: tl.constexpr, ARRANGED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    h = normed(x, y, weight, total, row, stride_x, stride_y, eps, width, True, BLOCK)
    values, largest = _values(tl.reshape(h.to(tl.float32), [BLOCK // WIDTH, WIDTH]), 1, RULE, FOUR, BLOCK // WIDTH)
    d = tl.arange(0, BLOCK)
    values = tl.reshape(values, [BLOCK])
    tl.store(out + row * width + d, values, mask=d < width)
    if ARRANGED:
        _arrange(arranged, values, row, tl.num_programs(0), width, BLOCK)
    if RULE == 2:
        tl.store(amax + row, largest)


@triton.jit
def _swiglu(
    gate, up, out, amax, stride_gate, stride_up, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, RULE: tl.constexpr, FOUR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    h = gated(gate + row * stride_gate, up + row * stride_up, d, width)
    values, largest = _values(h.to(tl.float32), 1, RULE, FOUR, BLOCK // WIDTH)
    tl.store(out + row * width + d, values, mask=d < width)
    if RULE == 2:
        tl.store(amax + row, largest)


def columns(x_MK: Tensor, quantizer: Quantizer) -> Tensor:
    """BF16 [M, K] of `formats.quantize_decode` along axis -2; FP32 or BF16 rows. Only where `covers_columns`."""
    num_rows, depth = x_MK.shape
    width = quantizer.block[1]
    assert width is not None
    x, out = x_MK.contiguous(), x_MK.new_empty(x_MK.shape, dtype=bfloat16)
    wide = 128 if width <= 32 else 64
    _columns[(num_rows // width, triton.cdiv(depth, wide))](
        x, out, depth, WIDTH=width, COLUMNS=wide, RULE=_RULES[quantizer.rule], FOUR=quantizer.fmt.bits == 4,
        num_warps=4 if width <= 32 else 8,
    )  # fmt: skip
    return out


def residual_norm(
    x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float, quantizer: Quantizer
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`fused_triton.residual_norm`, its second result quantized: sum BF16, values BF16, amax FP32 [N] or None, and the
    values once more in the order of `ops.arranged` where a packed matmul may read them."""
    x_ND, y_ND = whole_rows(x_ND), whole_rows(y_ND)
    width, block = x_ND.shape[-1], triton.next_power_of_2(x_ND.shape[-1])
    total, out = x_ND.new_empty(x_ND.shape), x_ND.new_empty(x_ND.shape)
    amax, arranged = x_ND.new_empty(len(x_ND), dtype=float32) if quantizer.rule == "nvfp4" else None, room(x_ND)
    if len(x_ND):
        _norm[(len(x_ND),)](
            x_ND, y_ND, weight_D, total, out, out if arranged is None else arranged, total if amax is None else amax,
            x_ND.stride(0), y_ND.stride(0), eps, width,
            BLOCK=block, WIDTH=quantizer.block[1], RULE=_RULES[quantizer.rule], FOUR=quantizer.fmt.bits == 4,
            ARRANGED=arranged is not None, num_warps=warps_of(block), **options(x_ND.device),
        )  # fmt: skip
    return total, out, amax, arranged


def swiglu(gate_NF: Tensor, up_NF: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor | None]:
    """`fused_triton.swiglu`, quantized: values BF16 [N, F], amax FP32 [N] or None."""
    gate_NF, up_NF = whole_rows(gate_NF), whole_rows(up_NF)
    num_rows, width = gate_NF.shape
    out = gate_NF.new_empty(gate_NF.shape, dtype=bfloat16)
    whole_row = quantizer.rule == "nvfp4"
    amax = gate_NF.new_empty(num_rows, dtype=float32) if whole_row else None
    block = triton.next_power_of_2(width) if whole_row else 1024
    if num_rows:
        _swiglu[(num_rows, triton.cdiv(width, block))](  # rows first: only that axis goes beyond 65,535
            gate_NF, up_NF, out, out if amax is None else amax, gate_NF.stride(0), up_NF.stride(0), width,
            BLOCK=block, WIDTH=quantizer.block[1], RULE=_RULES[quantizer.rule], FOUR=quantizer.fmt.bits == 4,
            num_warps=_warps(block), **options(gate_NF.device),
        )  # fmt: skip
    return out, amax


def _warps(elements: int) -> int:
    return min(16, max(1, elements // 512))
