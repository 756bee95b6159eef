"""From codes and scales back to numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.formats.casts import E4M3, decode_elements, divide, e8m0_decode
from onegrid.formats.layouts import unpack
from onegrid.formats.quantize import QuantTensor


def elements(q: QuantTensor) -> Tensor:
    """FP32 element values in the logical shape, without any scale; NaN codes give NaN."""
    if q.quantizer.fmt.bits == 8:
        return decode_elements(q.codes, q.quantizer.fmt)
    along = q.shape[q.axis]
    codes = unpack(q.codes, along) if along else q.codes
    values = decode_elements(codes, q.quantizer.fmt)
    return values if q.axis == -1 else values.transpose(-1, -2).contiguous()


def scale_values(q: QuantTensor) -> Tensor:
    """FP32 value of every block scale, in the shape of `q.scales`."""
    if q.quantizer.scale == "e8m0":
        return e8m0_decode(q.scales)
    return decode_elements(q.scales, E4M3) if q.quantizer.scale == "e4m3" else q.scales


def decode(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Element values times block scales, in the logical shape; the global factor is left out.

    One FP32 product, then one rounding to `dtype`. In BF16 the values of MXFP8 with scale bytes 3..246, of MXFP4 up to
    252 and all of NVFP4 are exact. A scale byte of 255 decodes to NaN.
    """
    return _one_nan(elements(q) * _full(scale_values(q), q)).to(dtype)


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that `q` stands for, global factor included.

    With a global amax A: RN(code RN(RN(scale A) RN(1/(6 scale_max)))), then one rounding to `dtype`.
    Outside 7.9e-36 <= A <= 7.6e35 that is not the inverse of quantizing; such A is counted in `stats.overflow`.
    """
    if q.amax is None:
        return decode(q, dtype)
    amax = q.amax[..., None, None]
    if q.quantizer.span == "row":
        amax = q.amax.unsqueeze(q.axis)
    constant = divide(1.0, torch.full_like(amax, 6.0 * q.quantizer.scale_max))
    return _one_nan(elements(q) * _full((scale_values(q) * amax) * constant, q)).to(dtype)


def _one_nan(values: Tensor) -> Tensor:
    """NaN without sign and payload, which depend on the device when a NaN comes out of a product."""
    return values.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)


def _full(grid: Tensor, q: QuantTensor) -> Tensor:
    """A value per block, spread over the block's elements (or left to broadcast where it covers an axis whole)."""
    if q.quantizer.block == (None, None):
        return grid[..., None, None]
    block = q.quantizer.block if q.axis == -1 else q.quantizer.block[::-1]
    for dim, size in zip((-2, -1), block, strict=True):
        if size is not None and size > 1:
            grid = grid.repeat_interleave(size, dim).narrow(dim, 0, q.shape[dim])
    return grid
