"""Codes of MXFP8 from BF16 numbers in few integer passes, on a CPU: the bytes of `quantize` at many times its speed.

A power-of-two scale only moves a BF16 number's exponent, so the scaled number is the same 16 bits less a shift, and its
code is those bits without the four lowest, rounded to even. The scale comes from the definition, of the blocks alone.
Numbers below the smallest normal code, which are few, are rounded as floats.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onegrid.formats.casts import E4M3
from onegrid.formats.scales import RULES
from onegrid.formats.table import Quantizer

_LARGEST = (127 + 100) << 7
"""Bits of 2^100 in BF16; NaN and Inf are above."""
_BELOW_NORMAL = (127 - 6) << 7
"""Bits of 2^-6 in BF16."""
_REBIAS = (127 - 7) << 7
"""What BF16's exponent has more than E4M3's, in BF16 bits."""
CHUNK_ELEMENTS = 1 << 18
"""What is worked on at once, so that it stays in the processor's cache."""


def short_codes(x_MK: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor] | None:
    """Codes uint8 [M, K] and scales [M, K / 32] of BF16 `x` along its last axis; None: only the definition will do.

    Covers contiguous BF16 on a CPU, E4M3 in blocks of (1, w) that fill the axis, the rule "mx", signs of zeros kept.
    Blocks whose amax is not 0 and not between 2^-100 and 2^100, NaN and Inf among them, are left to the definition.
    """
    if not _covers(x_MK, quantizer):
        return None
    width = quantizer.block[1] or 1
    bits_GW = x_MK.view(torch.int16).view(-1, width)
    step = CHUNK_ELEMENTS // width
    chunks = [slice(start, start + step) for start in range(0, len(bits_GW), step)]
    amax_G = torch.cat([(bits_GW[rows] & 0x7FFF).amax(1) for rows in chunks])
    amax = amax_G.view(torch.bfloat16).float()
    if int(amax_G.max()) >= _LARGEST or bool(((amax < 2.0**-100) & (amax != 0)).any()):
        return None
    scaling = RULES[quantizer.rule](amax, None, quantizer, torch.bfloat16)
    exponent_G = ((scaling.decode.view(torch.int32) >> 23) - 127).clamp_(min=-110)  # what is 0 stays below normal
    less_G = exponent_G.to(torch.int16).mul_(128)
    codes_GW = torch.empty(bits_GW.shape, dtype=torch.uint8)
    for rows in chunks:
        _fill(codes_GW[rows], bits_GW[rows], less_G[rows], scaling.encode[rows])
    return codes_GW.view(x_MK.shape), scaling.scales.view(x_MK.shape[0], -1)


def _fill(codes_GW: Tensor, bits_GW: Tensor, less_G: Tensor, encode_G: Tensor) -> None:
    """Codes into `codes_GW`. less_G  what the scale takes from BF16's exponents, in BF16 bits"""
    scaled_GW = (bits_GW & 0x7FFF).sub_(less_G.unsqueeze(1))
    # NumPy compares and collects 16 bits several times as fast; of ordinary weights few are so small.
    low = torch.from_numpy(np.flatnonzero(scaled_GW.numpy().ravel() < _BELOW_NORMAL))
    rounding_GW = (scaled_GW >> 4).bitwise_and_(1).add_(7 - _REBIAS)
    codes_GW.copy_(scaled_GW.add_(rounding_GW).bitwise_right_shift_(4))
    if len(low):
        x_L = bits_GW.reshape(-1)[low].view(torch.bfloat16).float().abs_()
        encode_L = encode_G[low // bits_GW.shape[1]]
        codes_GW.view(-1)[low] = (x_L * encode_L * 2.0**9).round_().to(torch.uint8)  # at most 8, the first normal code
    codes_GW.bitwise_or_((bits_GW >> 8).bitwise_and_(0x80).to(torch.uint8))


def _covers(x: Tensor, quantizer: Quantizer) -> bool:
    across, along = quantizer.block
    return (
        x.device.type == "cpu"
        and x.dim() == 2
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and x.numel() > 0
        and quantizer.fmt == E4M3
        and quantizer.rule == "mx"
        and quantizer.scale == "e8m0"
        and quantizer.span == "none"
        and across == 1
        and along is not None
        and x.shape[1] % along == 0
        and quantizer.zero_sign == "keep"
        and quantizer.nan == "element"
        and quantizer.ties == "even"
    )
