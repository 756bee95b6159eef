"""Values of MX formats in few passes, for ordinary numbers on a CPU: the bytes of `quantize_decode`, half the work.

The power of two of a block comes from the bits of its amax: adding what the maximum's mantissa lacks carries into the
exponent exactly where the block must go one up (numerics: RN(amax RN(1/max)) rounded up gives the same for every
significand). Blocks beyond 2^+-100, NaN and Inf, and edges are left to the definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.formats.table import Quantizer

_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
_EXPONENT = 0x7F800000
CHUNK_ELEMENTS = 1 << 17
"""What is worked on at once, so that it stays in the processor's cache."""


def short_values(x_MK: Tensor, quantizer: Quantizer) -> Tensor | None:
    """FP32 values of BF16 or FP32 `x_MK` along its last axis, or None where only the definition will do.

    Covers two axes on a CPU, blocks of (1, w) that fill the rows, the rule "mx", signs kept.
    """
    if not _covers(x_MK, quantizer):
        return None
    out = torch.empty(x_MK.shape)
    rows = max(1, CHUNK_ELEMENTS // x_MK.shape[1])
    for start in range(0, len(x_MK), rows):
        if not _fill(out[start : start + rows], x_MK[start : start + rows], quantizer):
            return None
    return out


def _fill(out: Tensor, x_MK: Tensor, quantizer: Quantizer) -> bool:
    """Values into `out`, or False."""
    rows, width = x_MK.shape
    fmt, block = quantizer.fmt, quantizer.block[1] or 1
    x = x_MK.float().view(rows, width // block, block)
    magnitude = torch.abs(x, out=out.view_as(x))
    amax = magnitude.amax(-1, keepdim=True)
    if not bool(amax.max() < _LARGEST) or bool(((amax < _SMALLEST) & (amax != 0)).any()):
        return False
    top = _bits(fmt.max)
    carry = 0x007FFFFF - (top & 0x007FFFFF)
    decode_bits = amax.clamp_(min=_SMALLEST).view(torch.int32).add_(carry).bitwise_and_(_EXPONENT)
    decode_bits = decode_bits.sub_((top & _EXPONENT) - 0x3F800000)
    encode = (0x7F000000 - decode_bits).view(torch.float32)
    magnitude.mul_(encode)
    anchor = magnitude.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    shift = 23 - fmt.mantissa_bits
    anchor = anchor.mul_(2.0**shift).clamp_(min=2.0 ** (fmt.min_exponent + shift))
    magnitude.add_(anchor).sub_(anchor).mul_(decode_bits.view(torch.float32)).copysign_(x)
    return True


def _covers(x_MK: Tensor, quantizer: Quantizer) -> bool:
    across, along = quantizer.block
    return (
        x_MK.device.type == "cpu"
        and x_MK.dim() == 2
        and x_MK.numel() > 0
        and x_MK.dtype in (torch.bfloat16, torch.float32)
        and quantizer.rule == "mx"
        and quantizer.scale == "e8m0"
        and across == 1
        and along is not None
        and x_MK.shape[1] % along == 0
        and quantizer.zero_sign == "keep"
        and quantizer.nan == "element"
        and quantizer.ties == "even"
        and not torch.compiler.is_compiling()
    )


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
