"""Quantizing and decoding a big weight a few rows at a time: the same bytes, from temporaries that stay in the cache.

Rows depend on each other through the global amax alone, which is known or taken first. Measured on one core of a
loaded CPU, pieces of 2^18 elements go four times as fast as whole matrices of 12 million.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError
from onegrid.formats import Quantizer, QuantTensor, dequantize, quantize
from onegrid.formats.quantize import Stats
from onegrid.formats.short_codes import short_codes

PIECE = 1 << 18
"""Elements of a piece; its rows are a multiple of the tallest block."""
_TALLEST = 128


def quantize_by_rows(x_NK: Tensor, quantizer: Quantizer, amax: Tensor | None) -> QuantTensor:
    """`formats.quantize` of a matrix along its last axis, byte for byte."""
    short = short_codes(x_NK, quantizer) if amax is None else None
    if short is not None:
        codes_NK, scales_NB = short
        none = torch.zeros((), dtype=torch.int64)
        return QuantTensor(codes_NK, scales_NB, None, None, tuple(x_NK.shape), quantizer, -1, Stats(none, none, none))
    if amax is None and quantizer.span == "tensor":
        amax = largest(x_NK)
    pieces = [quantize(x_NK[rows], quantizer, amax=amax) for rows in _pieces(x_NK.shape)]
    if len(pieces) == 1:
        return pieces[0]
    whole = quantizer.block == (None, None)
    counts = (
        torch.stack([getattr(q.stats, name) for q in pieces]).sum() for name in ("nonfinite", "saturated", "overflow")
    )
    first = pieces[0]
    if quantizer.span == "row" and quantizer.has_amax:
        amaxes, factors = [q.amax for q in pieces], [q.factor for q in pieces]
        first = replace(first, amax=torch.cat([a for a in amaxes if a is not None]))
        first = replace(first, factor=torch.cat([f for f in factors if f is not None]))
    return replace(
        first,
        codes=torch.cat([q.codes for q in pieces]),
        scales=pieces[0].scales if whole else torch.cat([q.scales for q in pieces]),
        shape=tuple(x_NK.shape),
        stats=Stats(*counts),
    )


def dequantize_by_rows(q: QuantTensor, dtype: torch.dtype) -> Tensor:
    """`formats.dequantize` of a matrix quantized along its last axis, byte for byte."""
    out_NK = torch.empty(q.shape, dtype=dtype)
    height = q.quantizer.block[0]
    for rows in _pieces(q.shape):
        scales = q.scales if height is None else q.scales[rows.start // height : -(-rows.stop // height)]
        amax = q.amax[rows] if q.amax is not None and q.quantizer.span == "row" else q.amax
        piece = replace(q, codes=q.codes[rows], scales=scales, amax=amax, shape=(rows.stop - rows.start, q.shape[1]))
        out_NK[rows] = dequantize(piece, dtype)
    return out_NK


@contextmanager
def one_core_each() -> Iterator[None]:
    """Torch works on the calling thread alone inside; what is parallel are weights, not the rows of one.

    Where more programs than cores run, threads that wait for each other after every operation cost fifteen times the
    work itself (measured at load 7 on 2 cores); whole weights wait for nobody.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, FP32 of shape (). 0 for an empty tensor, NaN if there is one."""
    if x.numel() == 0:
        return torch.zeros(())
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def require_finite(name: str, x: Tensor) -> Tensor:
    """The tensor itself. NonFiniteError with the count if any number is NaN or Inf."""
    if not bool(largest(x).isfinite()):
        num_bad = x.numel() - int(x.isfinite().sum())
        raise NonFiniteError(f"{name} has {num_bad} NaN or Inf among {x.numel()} numbers")
    return x


def _pieces(shape: tuple[int, ...] | torch.Size) -> Iterator[slice]:
    rows, columns = shape
    step = max(1, PIECE // max(1, columns) // _TALLEST) * _TALLEST
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))
