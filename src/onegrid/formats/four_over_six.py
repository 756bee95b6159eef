"""NVFP4 4-over-6: every block picks the scale that brings its largest value to 4 or to 6, whichever errs less.

E2M1 has no value between 4 and 6, so a block with large values near 5 is better off with a coarser maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.formats.casts import E2M1, E4M3, FLT_MAX, divide, encode_exact, round_magnitude_
from onegrid.formats.scales import Scaling, global_encode
from onegrid.formats.table import Quantizer


def four_over_six(inputs: Tensor, amax_G: Tensor, global_amax_G: Tensor, quantizer: Quantizer) -> Scaling:
    """The scales of blocks `inputs` [..., Mb, h, Kb, w], FP32, with the choice made per block.

    Errors are summed in FP32 in the order of the rule: 16 elements one after another from 0; the 16 rows of a tile by
    halves (8, 4, 2, 1). A tie takes 6, and so
    does a block with a NaN or Inf. Source: Transformer Engine 2.20.
    """
    encode_G = global_encode(global_amax_G, quantizer)
    decode_G = divide(1.0, encode_G)
    base_G = divide(amax_G, torch.full_like(amax_G, 6.0)) * encode_G
    magnitude = inputs.abs()
    candidates = []
    for target_G in (base_G * 1.5, base_G):
        block_G = round_magnitude_(target_G.clamp(max=448.0), E4M3)
        multiplier_G = divide(1.0, block_G * decode_G).clamp_(max=FLT_MAX)
        rounded = round_magnitude_(magnitude * _spread(multiplier_G), E2M1)
        values = rounded.mul_(_spread(block_G)).mul_(_spread(global_amax_G.expand_as(amax_G)))
        values = divide(values, torch.full_like(values, 6.0 * quantizer.scale_max))
        candidates.append((block_G, multiplier_G, _error_sum(values - magnitude, quantizer)))
    (block_4, multiplier_4, error_4), (block_6, multiplier_6, error_6) = candidates
    takes_4 = error_4 < error_6
    block_G = torch.where(takes_4, block_4, block_6)
    return Scaling(encode_exact(block_G, E4M3), torch.where(takes_4, multiplier_4, multiplier_6), block_G)


def _error_sum(difference: Tensor, quantizer: Quantizer) -> Tensor:
    """[..., Mb, Kb]. Values and inputs have equal signs, so differences of magnitudes have the same size."""
    if quantizer.four_over_six == "mae":
        terms = difference.abs()
    else:  # rounded on its own: a float64 product is exact, and a compiler cannot contract it into the sum
        terms = (difference.double() * difference.double()).float()
    height, width = terms.shape[-3], terms.shape[-1]
    if 16 not in (height, width):
        raise FormatError(f"{quantizer}: 4-over-6 needs blocks of 16, not {height} x {width}")
    sums = _one_after_another(terms, -1 if width == 16 else -3)
    while sums.shape[-3] > 1:
        half = sums.shape[-3] // 2
        sums = sums[..., :half, :, :] + sums[..., half:, :, :]
    return sums[..., 0, :, 0]


def _one_after_another(terms: Tensor, dim: int) -> Tensor:
    total = torch.zeros_like(terms.narrow(dim, 0, 1))
    for i in range(terms.shape[dim]):
        total = total + terms.narrow(dim, i, 1)
    return total


def _spread(grid: Tensor) -> Tensor:
    return grid[..., :, None, :, None]
