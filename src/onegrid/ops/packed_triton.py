"""Matmuls at few rows that read packed codes and scales and decode them on the way to the matrix unit.

    out [M, N] = x [M, K]  decode(w) [N, K]^T,  FP32 sums with K ascending, rounded once

Decoded values are exact in BF16 for MX formats with scale bytes 7 .. 246 and for NVFP4's block values, so products
are those of the decoded path. Whether the sums are is a question of how the compiler lays operands out, so a kernel
is `bits` for the shapes and settings that tests/ops/test_triton.py runs through.
On an H200 it is slower than decoded weights at every shape of an 8B model (LOG.md), so nothing chooses it yet.

Decoding works on bit patterns: a code shifted to BF16's fields is the value times a power of two, subnormal codes
included (they become subnormal BF16), and one BF16 product takes it back, exactly. Codes of NaN are not decoded as
NaN: weights are finite by the time they are published.
"""

import triton
import triton.language as tl
from torch import Tensor, bfloat16

from onegrid.errors import CapabilityError
from onegrid.formats import QuantTensor
from onegrid.ops.linear import ALPHA0
from onegrid.ops.operand import Operand

CONFIGS = ((64, 32, 256, 4, 3, False), (32, 64, 256, 4, 3, True), (64, 64, 128, 4, 4, False), (32, 64, 128, 4, 4, True))
"""(rows, columns and K of a tile, warps, stages, weights as first operand): the fastest ones on an H200."""

_E4M3 = tl.constexpr(
    """{
    .reg .b32 a, b, s, m;
    prmt.b32 a, 0, $2, 0x5040;
    prmt.b32 b, 0, $2, 0x7060;
    and.b32 s, a, 0x80008000;
    shr.u32 m, a, 4;
    and.b32 m, m, 0x07F007F0;
    or.b32 s, s, m;
    mov.b32 m, 0x7B807B80;
    mul.bf16x2 $0, s, m;
    and.b32 s, b, 0x80008000;
    shr.u32 a, b, 4;
    and.b32 a, a, 0x07F007F0;
    or.b32 s, s, a;
    mul.bf16x2 $1, s, m;
    }"""
)
"""Four E4M3 codes to four BF16 values: fields moved down by four bits, times 2^120."""

_E2M1_LOW = tl.constexpr(
    """{
    .reg .b32 a, s, m, c;
    mov.b32 c, 0x7E807E80;
    prmt.b32 a, 0, $2, 0x5040;
    shl.b32 s, a, 4;
    and.b32 s, s, 0x80008000;
    shr.u32 m, a, 2;
    and.b32 m, m, 0x01C001C0;
    or.b32 s, s, m;
    mul.bf16x2 $0, s, c;
    prmt.b32 a, 0, $2, 0x7060;
    shl.b32 s, a, 4;
    and.b32 s, s, 0x80008000;
    shr.u32 m, a, 2;
    and.b32 m, m, 0x01C001C0;
    or.b32 s, s, m;
    mul.bf16x2 $1, s, c;
    }"""
)
"""Low halves of four bytes: sign to bit 15, exponent and mantissa to bits 8..6, times 2^126."""

_E2M1_HIGH = tl.constexpr(
    """{
    .reg .b32 a, s, m, c;
    mov.b32 c, 0x7E807E80;
    prmt.b32 a, 0, $2, 0x5040;
    and.b32 s, a, 0x80008000;
    shr.u32 m, a, 6;
    and.b32 m, m, 0x01C001C0;
    or.b32 s, s, m;
    mul.bf16x2 $0, s, c;
    prmt.b32 a, 0, $2, 0x7060;
    and.b32 s, a, 0x80008000;
    shr.u32 m, a, 6;
    and.b32 m, m, 0x01C001C0;
    or.b32 s, s, m;
    mul.bf16x2 $1, s, c;
    }"""
)
"""High halves of four bytes."""


@triton.jit
def _scales(at, stride_n, n, k0, K, N, BLOCK: tl.constexpr, COUNT: tl.constexpr, E8M0: tl.constexpr):
    """BF16 multipliers [BN, COUNT] of the blocks from k0 on."""
    block = k0 // BLOCK + tl.arange(0, COUNT)
    inside = (n < N)[:, None] & (block * BLOCK < K)[None, :]
    byte = tl.load(at + n[:, None].to(tl.int64) * stride_n + block[None, :], mask=inside, other=0)
    if E8M0:
        bits = tl.maximum(byte.to(tl.int32) << 7, 0x40).to(tl.int16)  # byte 0 is the subnormal 2^-127
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _weights(codes, stride_n, n, k0, K, N, BK: tl.constexpr, FOUR_BITS: tl.constexpr):
    """BF16 element values [BN, BK] without scales."""
    if FOUR_BITS:
        k = k0 // 2 + tl.arange(0, BK // 2)
        inside = (n < N)[:, None] & (k * 2 < K)[None, :]
        byte = tl.load(codes + n[:, None].to(tl.int64) * stride_n + k[None, :], mask=inside, other=0)
        low = tl.inline_asm_elementwise(_E2M1_LOW, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_E2M1_HIGH, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)
        return tl.join(low, high).reshape(n.shape[0], BK)
    else:
        k = k0 + tl.arange(0, BK)
        inside = (n < N)[:, None] & (k < K)[None, :]
        byte = tl.load(codes + n[:, None].to(tl.int64) * stride_n + k[None, :], mask=inside, other=0)
        return tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _mul(x, y):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _packed_matmul(
    x, codes, scales, x_row, w_row, out, M, N, K, stride_x, stride_w, stride_s, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, FOUR_BITS: tl.constexpr,
    E8M0: tl.constexpr, TWO_ROWS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """SWAP: weights are the matrix unit's first operand, so that few rows cost few instructions."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    sum_MN = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        w_NK = _weights(codes, stride_w, n, k0, K, N, BK, FOUR_BITS)
        s = _scales(scales, stride_s, n, k0, K, N, BLOCK, BK // BLOCK, E8M0)
        w_NK = (w_NK.reshape(BN, BK // BLOCK, BLOCK) * s[:, :, None]).reshape(BN, BK)
        inside = (m < M)[:, None] & (k < K)[None, :]
        x_MK = tl.load(x + m[:, None].to(tl.int64) * stride_x + k[None, :], mask=inside, other=0.0)
        sum_MN = tl.dot(w_NK, tl.trans(x_MK), sum_MN) if SWAP else tl.dot(x_MK, tl.trans(w_NK), sum_MN)
    if SWAP:
        sum_MN = tl.trans(sum_MN)
    if TWO_ROWS:
        row = _mul(
            tl.broadcast_to(tl.load(x_row + m, mask=m < M, other=0.0)[:, None], [BM, BN]),
            tl.broadcast_to(tl.load(w_row + n, mask=n < N, other=0.0)[None, :], [BM, BN]),
        )
        sum_MN = _mul(_mul(sum_MN, tl.full([BM, BN], 1.0, tl.float32) * alpha), row)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + at, sum_MN.to(tl.bfloat16), mask=(m < M)[:, None] & (n < N)[None, :])


def packed_matmul(
    a: Operand, weight: QuantTensor, row_N: Tensor | None, config: tuple[int, int, int, int, int, bool] = CONFIGS[0]
) -> Tensor:
    """BF16 [M, N]: `ops.linear.matmul` of `a` and the weight's decoded operand, from its codes and scales.

    a       activations, "decoded" or "nvfp4"; weight of the same kind, [N, K], contraction along K
    row_N   FP32 [N] global amax per row of an NVFP4 weight, else None
    config  one of CONFIGS; changes the speed only
    Raises CapabilityError for other formats.
    """
    quantizer = weight.quantizer
    if quantizer.matmul not in ("decoded", "nvfp4") or quantizer.block not in ((1, 16), (1, 32)) or weight.axis != -1:
        raise CapabilityError(f"packed matmul: {quantizer} is not covered; MX formats of 1 x 32 and NVFP4 are")
    rows, columns, depth, warps, stages, swap = config
    x = a.values.contiguous()
    num_rows, width = x.shape
    out = x.new_empty(num_rows, weight.shape[0], dtype=bfloat16)
    two = quantizer.matmul == "nvfp4"
    factors = (a.row.contiguous(), row_N.contiguous()) if two and a.row is not None and row_N is not None else (x, x)
    _packed_matmul[(triton.cdiv(weight.shape[0], columns), triton.cdiv(num_rows, rows))](
        x, weight.codes, weight.scales, *factors, out, num_rows, weight.shape[0], width,
        x.stride(0), weight.codes.stride(0), weight.scales.stride(0), ALPHA0,
        BM=rows, BN=columns, BK=depth, BLOCK=quantizer.block[1], FOUR_BITS=quantizer.fmt.bits == 4,
        E8M0=quantizer.scale == "e8m0", TWO_ROWS=two, SWAP=swap, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
