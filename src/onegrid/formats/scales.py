"""Scale rules: from the amax of every block (and a global amax) to the scale that is stored and the one that is used.

A rule is `rule(amax_G, global_amax_G, quantizer, dtype) -> Scaling` on the grid G of blocks, everything FP32.
`dtype` is the dtype of the input. The first three are the project's own; `variants.py` has those of other engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.formats.casts import (
    E2M1,
    E4M3,
    E5M2,
    FLT_MAX,
    divide,
    e8m0_decode,
    e8m0_inverse,
    e8m0_up,
    encode_exact,
    round_magnitude_,
)
from onegrid.formats.table import Quantizer

RECIPROCAL = {  # RN(1 / max), the constants of the rule
    E4M3.name: 0.002232142956927418708801269531,  # 0x3B124925
    E5M2.name: 1.74386168509954586625099182e-05,  # 0x37924925
    E2M1.name: 0.1666666716337204,  # 0x3E2AAAAB
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a rule says about a grid of blocks."""

    scales: Tensor
    """As stored: uint8 bytes or FP32 decode multipliers."""
    encode: Tensor
    """FP32: elements are multiplied by it (or divided, where `divides`) before the cast."""
    decode: Tensor
    """FP32 value of the stored scale, the multiplier of `decode`."""
    divides: bool = False


Rule = Callable[[Tensor, Tensor | None, Quantizer, torch.dtype], Scaling]


def mx(amax_G: Tensor, global_amax_G: Tensor | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """Power of two, rounded up so that no element saturates: E8M0_up(RN(amax RN(1/max))). A zero block stores 0."""
    return from_e8m0(e8m0_up(amax_G * RECIPROCAL[quantizer.fmt.name]))


def from_e8m0(scales_G: Tensor) -> Scaling:
    """Elements times the exact inverse of the stored power of two."""
    return Scaling(scales_G, e8m0_inverse(scales_G), e8m0_decode(scales_G))


def nvfp4(amax_G: Tensor, global_amax_G: Tensor | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """E4M3 block scale under an FP32 global scale. A zero block stores 0; an underflowed scale sends data to +-6."""
    assert global_amax_G is not None
    encode_G = global_encode(global_amax_G, quantizer)
    decode_G = divide(1.0, encode_G)
    block_G = round_magnitude_((amax_G * (encode_G * RECIPROCAL[E2M1.name])).clamp_(max=FLT_MAX), E4M3)
    return Scaling(encode_exact(block_G, E4M3), divide(1.0, block_G * decode_G).clamp_(max=FLT_MAX), block_G)


def global_encode(global_amax: Tensor, quantizer: Quantizer) -> Tensor:
    """S_enc = min(RN(6 scale_max / A), FLT_MAX); 1 for A of 0 or Inf, FLT_MAX for a NaN that the caller supplied."""
    encode = divide(6.0 * quantizer.scale_max, global_amax).nan_to_num(nan=FLT_MAX, posinf=FLT_MAX)
    return torch.where((global_amax == 0) | (encode == 0), 1.0, encode)


def fp8(amax_G: Tensor, global_amax_G: Tensor | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """FP32 scale RN(max / amax); the stored decode multiplier is RN(1 / scale). 1 where amax is 0 or not finite."""
    return _fp8(amax_G, quantizer, FLT_MAX)


def fp8_block(amax_G: Tensor, global_amax_G: Tensor | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """As `fp8`, with an infinite scale replaced by the largest number of the input's dtype."""
    return _fp8(amax_G, quantizer, torch.finfo(dtype).max)


def _fp8(amax_G: Tensor, quantizer: Quantizer, largest: float) -> Scaling:
    encode_G = divide(quantizer.fmt.max, amax_G)
    encode_G = torch.where(encode_G == torch.inf, largest, encode_G)
    if quantizer.pow2:
        encode_G = (encode_G.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode_G = torch.where((amax_G > 0) & (amax_G < torch.inf), encode_G, 1.0)
    scales_G = divide(1.0, encode_G)
    return Scaling(scales_G, encode_G, scales_G)


RULES: dict[str, Rule] = {"mx": mx, "nvfp4": nvfp4, "fp8": fp8, "fp8_block": fp8_block}
