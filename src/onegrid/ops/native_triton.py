"""FP8 blocks of 1 x 128 along rows and along columns of one tensor, in one pass: the bytes of the definition.

A tile of 128 x 128 is read once. Divisions are correctly rounded, products are never part of a multiply-add, and the
cast is the hardware's, which rounds to nearest even and saturates: what `formats.quantize` says.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit
def _mul(x, y):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _encode(amax, POW2: tl.constexpr):
    """448 / amax; the largest BF16 where that is infinite, 1 where amax is 0 or infinite."""
    encode = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)
    largest = tl.full(amax.shape, 0x7F7F0000, tl.int32).to(tl.float32, bitcast=True)
    encode = tl.where(encode == float("inf"), largest, encode)
    if POW2:
        encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((amax > 0) & (amax < float("inf")), encode, 1.0)


@triton.jit
def _quantize_blocks(
    x, codes, scales, codes_t, scales_t, M, K, stride, POW2: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr
):
    i = tl.program_id(1) * B + tl.arange(0, B)
    j = tl.program_id(0) * B + tl.arange(0, B)
    inside = (i < M)[:, None] & (j < K)[None, :]
    value = tl.load(x + i.to(tl.int64)[:, None] * stride + j[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.where(value == value, tl.abs(value), 0.0)
    encode = _encode(tl.max(size, 1), POW2)
    code = _mul(value, tl.broadcast_to(encode[:, None], [B, B])).to(tl.float8e4nv)
    tl.store(codes + i.to(tl.int64)[:, None] * K + j[None, :], code, mask=inside)
    one = tl.full([B], 1.0, tl.float32)
    tl.store(scales + tl.program_id(0).to(tl.int64) * M + i, tl.div_rn(one, encode), mask=i < M)
    if COLUMNS:
        encode = _encode(tl.max(size, 0), POW2)
        code = tl.trans(_mul(value, tl.broadcast_to(encode[None, :], [B, B])).to(tl.float8e4nv))
        tl.store(codes_t + j.to(tl.int64)[:, None] * M + i[None, :], code, mask=(j < K)[:, None] & (i < M)[None, :])
        tl.store(scales_t + tl.program_id(1).to(tl.int64) * K + j, tl.div_rn(one, encode), mask=j < K)


def quantize_blocks(x_MK: Tensor, *, pow2: bool, columns: bool) -> list[tuple[Tensor, Tensor]]:
    """E4M3 [M, K] and FP32 scales [K / 128, M]; where `columns`, also [K, M] and [M / 128, K] of the transpose.

    x_MK BF16, K contiguous. NaN gets the NaN code and does not enter a scale; Inf saturates, with scale 1.
    """
    x_MK = x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()
    rows, width = x_MK.shape
    device = x_MK.device
    out = []
    for m, k in ((rows, width), (width, rows)) if columns else ((rows, width),):
        codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=device)
        out.append((codes, torch.empty(triton.cdiv(k, BLOCK), m, dtype=torch.float32, device=device)))
    (codes, scales), (codes_t, scales_t) = out[0], out[-1]
    grid = (triton.cdiv(width, BLOCK), triton.cdiv(rows, BLOCK))
    _quantize_blocks[grid](
        x_MK, codes, scales, codes_t, scales_t, rows, width, x_MK.stride(0),
        POW2=pow2, COLUMNS=columns, B=BLOCK, num_warps=4 if columns else 16,
    )  # fmt: skip
    return out
