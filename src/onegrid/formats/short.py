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


def short_values(x: Tensor, quantizer: Quantizer, axis: int = -1) -> Tensor | None:
    """FP32 values of BF16 or FP32 `x` [..., M, K] along `axis`, laid out as `x`; None: only the definition will do.

    Covers contiguous tensors on a CPU, blocks of (1, w) that fill the axis, the rule "mx", signs kept.
    """
    if not _covers(x, quantizer, axis):
        return None
    out = torch.empty(x.shape)
    block, width = quantizer.block[1] or 1, x.shape[-1]
    # [blocks, numbers of a block, columns], or [rows, blocks, numbers of a block]; no block spans two of the first axis
    shape = (-1, block, width) if axis == -2 else (-1, width // block, block)
    x_B, out_B = x.view(shape), out.view(shape)
    step = max(1, CHUNK_ELEMENTS // (x_B.shape[1] * x_B.shape[2]))
    for start in range(0, len(x_B), step):
        if not _fill(out_B[start : start + step], x_B[start : start + step], quantizer, 1 if axis == -2 else 2):
            return None
    return out


def _fill(out: Tensor, x: Tensor, quantizer: Quantizer, along: int) -> bool:
    """Values into `out`, or False. along  the axis, of three, whose numbers share a scale"""
    fmt, x = quantizer.fmt, x.float()
    magnitude = torch.abs(x, out=out)
    amax = magnitude.amax(along, keepdim=True)
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


def _covers(x: Tensor, quantizer: Quantizer, axis: int) -> bool:
    across, along = quantizer.block
    return (
        x.device.type == "cpu"
        and x.dim() >= 2
        and x.is_contiguous()
        and x.numel() > 0
        and x.dtype in (torch.bfloat16, torch.float32)
        and quantizer.rule == "mx"
        and quantizer.scale == "e8m0"
        and across == 1
        and along is not None
        and x.shape[axis] % along == 0
        and quantizer.zero_sign == "keep"
        and quantizer.nan == "element"
        and quantizer.ties == "even"
        and not torch.compiler.is_compiling()
    )


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
