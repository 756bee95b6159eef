"""The grid matmul: exact products of decoded values, FP32 sums, one epilogue, one rounding.

Sums are FP32 with K ascending inside the library's kernel; `pins.TILE` makes a row independent of its neighbours.
Source of the epilogues: numerics.md sections 3.1 (row-scaled NVFP4), 4, 5 and design decision 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.ops.operand import Operand
from onegrid.ops.pins import pad_rows

BLOCK = 128
ALPHA0 = 1.0 / (36.0 * 448.0 * 448.0)
"""From sums of NVFP4 block values to numbers, before the two amax values. In FP32: 0x34149B93."""
RECIPROCAL_2688 = 1.0 / 2688.0


def dot(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """FP32 sums of products, [..., M, N], from two exact operands [..., M, K] and [..., N, K]. Zero K gives zeros."""
    if a_MK.dtype == torch.float32:
        return a_MK @ b_NK.mT
    # Columns that are no multiple of TILE would make the library choose other kernels, by the number of rows.
    num_columns, b_NK = b_NK.shape[-2], pad_rows(b_NK)
    multiply = torch.mm if a_MK.dim() == 2 else torch.bmm
    return multiply(a_MK, b_NK.mT, out_dtype=torch.float32)[..., :num_columns]


def matmul(a: Operand, b: Operand, *, out_dtype: torch.dtype = torch.bfloat16, bias_N: Tensor | None = None) -> Tensor:
    """`a` [..., M, K] times `b` [..., N, K] transposed: [..., M, N].

    bias_N  added in FP32 before the one rounding to `out_dtype`
    NaN and Inf spread as in FP32 arithmetic. Raises FormatError where K or the leading axes differ.
    """
    if a.values.shape[-1] != b.values.shape[-1] or a.values.shape[:-2] != b.values.shape[:-2]:
        raise FormatError(f"operands do not fit: {tuple(a.values.shape)} and {tuple(b.values.shape)}; both end in K")
    if a.kind.startswith("native_"):
        from onegrid.ops.native import native_matmul

        return native_matmul(a, b, out_dtype=out_dtype, bias_N=bias_N)
    num_rows = a.values.shape[-2]
    if a.values.is_cuda and out_dtype == torch.bfloat16 and bias_N is None and a.kind == b.kind == "decoded":
        # The library rounds the same FP32 sums itself: same bytes, half the traffic, one launch less.
        return (pad_rows(a.values) @ pad_rows(b.values).mT)[..., :num_rows, : b.values.shape[-2]]
    if "block" in (a.kind, b.kind):
        out = _block_sums(a, b)
    else:
        out = dot(pad_rows(a.values), b.values)[..., :num_rows, :]
        out = _epilogue(out, a, b)
    if bias_N is not None:
        out = out + bias_N.float()
    return out.to(out_dtype)


def _epilogue(acc: Tensor, a: Operand, b: Operand) -> Tensor:
    if a.kind == b.kind == "nvfp4":
        assert a.row is not None and b.row is not None
        return (acc * _fp32(ALPHA0, acc)) * (a.row.unsqueeze(-1) * b.row.unsqueeze(-2))
    for side, axis in ((a, -1), (b, -2)):
        if side.row is not None:
            row = side.row * _fp32(RECIPROCAL_2688, acc) if side.kind == "nvfp4" else side.row
            acc = acc * row.unsqueeze(axis)
    return acc


def _block_sums(a: Operand, b: Operand) -> Tensor:
    """One FP32 partial sum per 128 of K, times RN(scale of a times scale of b), added in ascending order."""
    num_rows, num_columns = a.values.shape[-2], b.values.shape[-2]
    out = torch.zeros(*a.values.shape[:-1], num_columns, dtype=torch.float32, device=a.values.device)
    for index, start in enumerate(range(0, a.values.shape[-1], BLOCK)):
        part = slice(start, start + BLOCK)
        sums = dot(pad_rows(a.values[..., part].contiguous()), b.values[..., part].contiguous())[..., :num_rows, :]
        scale = _block_scale(a, index).unsqueeze(-1) * _block_scale(b, index).unsqueeze(-2)
        out = out + sums * scale
    return _epilogue(out, a, b)


def _block_scale(side: Operand, index: int) -> Tensor:
    if side.block is None:
        return torch.ones(side.values.shape[:-1], dtype=torch.float32, device=side.values.device)
    return side.block[..., index]


def _fp32(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)  # `tensor` would copy, which no graph can
