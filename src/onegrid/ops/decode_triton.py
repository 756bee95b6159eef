"""Codes and scales to operand values on NVIDIA GPUs in one pass over memory, with the bytes of the definition.

Element by element the definition takes some 60 bytes of traffic; here it is the codes' own and two of BF16. A tile is
[blocks, width of a block]. Products are FP32 and rounded once, as in `formats.decode`; nothing is added.
"""

import triton
import triton.language as tl
from torch import Tensor, bfloat16

from onegrid.formats import QuantTensor

_INSIDE = ("decoded", "nvfp4")
"""Kinds of operands whose values have the block scales in them."""
_SCALES = {"e8m0": 1, "e4m3": 2, "fp32": 3}
_TILE = 4096
"""Numbers of a program."""


def covers(q: QuantTensor) -> bool:
    """Whether `values` gives what `ops.operand.operand_of` needs: contraction last, whole blocks, storage in order."""
    if q.axis != -1 or not q.codes.is_cuda or not q.codes.numel() or not q.codes.is_contiguous():
        return False
    if q.quantizer.fmt.bits == 4 and q.shape[-1] % 2:
        return False
    if q.quantizer.matmul not in _INSIDE:
        return q.quantizer.fmt.bits == 8
    height, width = q.quantizer.block
    if height is None or width is None or width & (width - 1) or width < 16:
        return False
    return q.scales.is_contiguous() and q.shape[-1] % width == 0 and q.shape[-2] % height == 0


def values(q: QuantTensor) -> Tensor:
    """BF16, shape of `q`: element values, times block scales where the operand has them inside. Only where `covers`.

    NaN codes and NaN scales give the NaN of the chip's own cast; Inf of E5M2 stays Inf.
    """
    quantizer, fmt = q.quantizer, q.quantizer.fmt
    out = q.codes.new_empty(q.shape, dtype=bfloat16)
    scaled = quantizer.matmul in _INSIDE
    height, width = quantizer.block if scaled else (1, 32)
    blocks = _TILE // (width or 1)
    _values[(triton.cdiv(out.numel(), _TILE),)](
        q.codes, q.scales, out, out.numel(), q.shape[-1] // (width or 1), height,
        WIDTH=width, BLOCKS=blocks, BITS=fmt.bits, MANTISSA=fmt.mantissa_bits, BIAS=fmt.bias,
        SCALE=_SCALES[quantizer.scale] if scaled else 0, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _element(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """`casts.decode_elements` of int32 codes."""
    sign: tl.constexpr = 1 << (BITS - 1)
    magnitude = code & (sign - 1)
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    small = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
    value = tl.where(magnitude < (1 << MANTISSA), small, normal)
    if MANTISSA == 3:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    if MANTISSA == 2:
        value = tl.where(magnitude == 0x7C, float("inf"), tl.where(magnitude > 0x7C, float("nan"), value))
    # A minus would be a subtraction from 0, which has another zero.
    return (value.to(tl.int32, bitcast=True) | ((code & sign) << (32 - BITS))).to(tl.float32, bitcast=True)


@triton.jit
def _values(
    codes, scales, out, count, blocks_of_row, height,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < count
    if SCALE != 0:  # whole blocks
        inside = (block * WIDTH < count)[:, None]
    if BITS == 4:
        half: tl.constexpr = WIDTH // 2
        pair_at = block[:, None] * half + tl.arange(0, half)[None, :]
        pair = tl.load(codes + pair_at, mask=inside, other=0).to(tl.int32)
        code = tl.interleave(pair & 15, pair >> 4)
    else:
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    value = _element(code, BITS, MANTISSA, BIAS)
    if SCALE != 0:
        row = block // blocks_of_row
        from_ = scales + (row // height) * blocks_of_row + (block - row * blocks_of_row)
        known = block * WIDTH < count
        if SCALE == 3:
            scale = tl.load(from_, mask=known, other=1.0)
        else:
            byte = tl.load(from_, mask=known, other=0).to(tl.int32)
            if SCALE == 1:
                scale = tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
                scale = tl.where(byte == 255, float("nan"), scale)
            else:
                scale = _element(byte, 8, 3, 7)
        value = value * scale[:, None]
    bits = value.to(tl.int32, bitcast=True)  # to nearest, ties to even, as `casts.round_bf16`
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits = tl.where(value == value, bits, 0x7FFF).to(tl.int16)
    tl.store(out + at, bits.to(tl.bfloat16, bitcast=True), mask=inside)
