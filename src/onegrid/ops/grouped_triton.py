"""Matmuls of experts whose bounds the device alone knows: FP32 sums with K ascending, factors, one rounding.

A program finds its expert by counting tiles in front of it, so the host only has to know the most tiles there can be;
programs beyond the last tile end at once. Sums over places run from an expert's first to its last: no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegrid.ops.grouped import Dispatch
from onegrid.ops.linear import ALPHA0, BLOCK, RECIPROCAL_2688
from onegrid.ops.operand import Operand

MUL = tl.constexpr("mul.rn.f32 $0, $1, $2;")
EXACT = tl.constexpr(True)
"""Products that nothing contracts, in assembly; an interpreter has none and needs none."""


@triton.jit
def _mul(x, y):
    if EXACT:
        return tl.inline_asm_elementwise(MUL, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x * y


@triton.jit
def _bounds(end_E, tile, E, EP: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of the expert) of a tile of BM rows; expert E for tiles beyond the last."""
    e = tl.arange(0, EP)
    end = tl.load(end_E + e, mask=e < E, other=0)
    begin = tl.load(end_E + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (end - begin + BM - 1) // BM, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (e < E)).to(tl.int32), 0)
    before = tl.max(tl.where((last <= tile) & (e < E), last, 0), 0)
    row = tl.sum(tl.where(e == expert, begin, 0), 0) + (tile - before) * BM
    return expert, row, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def _grouped(
    x, w, out, end_E, x_row, w_row, x_block, w_block, N, K, E, alpha,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, num_blocks,
    HAS_X: tl.constexpr, HAS_W: tl.constexpr, NVFP4: tl.constexpr, BLOCKED: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert, row, end = _bounds(end_E, tl.program_id(1), E, EP, BM)
    if expert >= E:
        return
    m = row + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_m, inside_n = m < end, n < N
    m, e = m.to(tl.int64), expert.to(tl.int64)
    x_at = x + m[:, None] * stride_xm
    w_at = w + e * stride_we + n.to(tl.int64)[None, :] * stride_wn
    total = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(x_at + k[None, :] * stride_xk, mask=inside_m[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(w_at + k[:, None] * stride_wk, mask=inside_n[None, :] & (k < K)[:, None], other=0.0)
        if BLOCKED:  # BK is the block
            part = tl.dot(a, b)
            index = k0 // BK
            sx, sw = tl.full([BM], 1.0, tl.float32), tl.full([BN], 1.0, tl.float32)
            if HAS_X:
                sx = tl.load(x_block + m * num_blocks + index, mask=inside_m, other=0.0)
            if HAS_W:
                sw = tl.load(w_block + (e * N + n) * num_blocks + index, mask=inside_n, other=0.0)
            scale = _mul(tl.broadcast_to(sx[:, None], [BM, BN]), tl.broadcast_to(sw[None, :], [BM, BN]))
            total += _mul(part, scale)
        else:
            total = tl.dot(a, b, total)
    if not BLOCKED:
        if NVFP4:
            total = _mul(total, tl.full([BM, BN], 1.0, tl.float32) * alpha)
            fx = tl.load(x_row + m, mask=inside_m, other=0.0)
            fw = tl.load(w_row + e * N + n, mask=inside_n, other=0.0)
            factor = _mul(tl.broadcast_to(fx[:, None], [BM, BN]), tl.broadcast_to(fw[None, :], [BM, BN]))
            total = _mul(total, factor)
        else:
            if HAS_X:
                fx = tl.load(x_row + m, mask=inside_m, other=0.0)
                total = _mul(total, tl.broadcast_to(fx[:, None], [BM, BN]))
            if HAS_W:
                fw = tl.load(w_row + e * N + n, mask=inside_n, other=0.0)
                total = _mul(total, tl.broadcast_to(fw[None, :], [BM, BN]))
    at = out + m[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])


@triton.jit
def _wgrad(
    dy, x, out, end_E, N, K, stride_dp, stride_dn, stride_xp, stride_xk,
    BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    begin = tl.load(end_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(end_E + expert)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    total = tl.zeros([BN, BK], tl.float32)
    for start in range(begin, end, BP):
        p = start + tl.arange(0, BP)
        at = p.to(tl.int64)
        a = tl.load(
            dy + at[None, :] * stride_dp + n[:, None] * stride_dn, mask=(n < N)[:, None] & (p < end)[None, :], other=0.0
        )
        b = tl.load(
            x + at[:, None] * stride_xp + k[None, :] * stride_xk, mask=(p < end)[:, None] & (k < K)[None, :], other=0.0
        )
        total = tl.dot(a, b, total)
    at = out + (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(at, total, mask=(n < N)[:, None] & (k < K)[None, :])


def grouped_matmul(a: Operand, b: Operand, places: Dispatch) -> Tensor:
    """`grouped.grouped_matmul` of every kind of operand; places behind the last expert are left as they were."""
    assert places.end_E is not None
    num_places, width = a.values.shape
    num_experts, columns, _ = b.values.shape
    out = torch.empty(num_places, columns, dtype=torch.bfloat16, device=a.values.device)
    blocked = "block" in (a.kind, b.kind)
    nvfp4 = a.kind == b.kind == "nvfp4"
    rows = [a.row, b.row]
    if not nvfp4:
        rows = [_factor(side) for side in (a, b)]
    sides = (a.block, b.block) if blocked else rows
    held = [a.values if t is None else t.contiguous() for t in (*rows, a.block, b.block)]
    if blocked:
        tile = (64, 64, BLOCK, 4, 3) if num_places > 64 * num_experts else (16, 64, BLOCK, 4, 3)
    else:
        tile = (128, 128, 64, 8, 3) if num_places > 64 * num_experts else (16, 64, 128, 4, 4)
    rows_tile, columns_tile, depth, warps, stages = tile
    most = triton.cdiv(num_places, rows_tile) + min(num_experts, num_places)
    _grouped[(triton.cdiv(columns, columns_tile), most)](
        a.values, b.values, out, places.end_E, *held, columns, width, num_experts, ALPHA0,
        *a.values.stride(), *b.values.stride(), triton.cdiv(width, BLOCK),
        HAS_X=sides[0] is not None, HAS_W=sides[1] is not None, NVFP4=nvfp4, BLOCKED=blocked,
        EP=triton.next_power_of_2(num_experts), BM=rows_tile, BN=columns_tile, BK=depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def grouped_wgrad(dy_PN: Tensor, x_PK: Tensor, places: Dispatch) -> Tensor:
    """`grouped.grouped_wgrad`."""
    assert places.end_E is not None
    num_experts, rows, columns = len(places.end_E), dy_PN.shape[1], x_PK.shape[1]
    out = torch.empty(num_experts, rows, columns, dtype=torch.float32, device=dy_PN.device)
    grid = (triton.cdiv(rows, 128), triton.cdiv(columns, 128), num_experts)
    _wgrad[grid](
        dy_PN, x_PK, out, places.end_E, rows, columns, *dy_PN.stride(), *x_PK.stride(),
        BN=128, BK=128, BP=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _factor(side: Operand) -> Tensor | None:
    """What the epilogue of `linear.matmul` multiplies by."""
    if side.row is None or side.kind != "nvfp4":
        return side.row
    return side.row * torch.full((), RECIPROCAL_2688, dtype=torch.float32, device=side.row.device)
