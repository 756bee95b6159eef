"""The draw of a token: one uniform number from a counter, and on a GPU the inverse of the distribution.

Sums have two levels there, blocks of ids and the ids of one block; a CPU draws from one running sum, `sampler.draw`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512
"""Ids that are added up first."""

WEYL = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: the step of splitmix64's counter."""
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and multipliers of splitmix64's finalizer; a shift by 31 comes last."""


def uniform(stream_N: Tensor, position_N: Tensor) -> Tensor:
    """FP64 in [0, 1): the top 53 bits of mix(stream + (position + 1) WEYL) times 2^-53, exact.

    stream_N    int64 from `sampler.draw.streams`
    position_N  int64, 0 for the first token of the response
    """
    x_N = stream_N + (position_N + 1) * _signed(WEYL)
    for shift, multiplier in MIX:
        x_N = (x_N ^ _shift_right(x_N, shift)) * _signed(multiplier)
    x_N = x_N ^ _shift_right(x_N, 31)
    return _shift_right(x_N, 11).double() * 2.0**-53


def draw(logp_NV: Tensor, stream_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First id whose cumulative probability exceeds uniform times the total: int64 [N]; its log-probability; finite.

    logp_NV               FP32 log-probabilities; -inf has probability zero and is never drawn
    stream_N, position_N  of `uniform`
    finite                bool [N]: every log-probability of the row is
    FP64 sums of blocks, then of the ids inside the block that holds the threshold. The order of sums is not that of a
    single running sum, so a threshold within some 1e-13 of a boundary may fall on its other side; the distribution is
    the same. A row with NaN draws some id of the vocabulary.
    """
    num_rows, width = logp_NV.shape
    p_NV = torch.nn.functional.pad(logp_NV.exp(), (0, -width % BLOCK))
    p_NBK = p_NV.view(num_rows, -1, BLOCK)
    cdf_NB = p_NBK.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold_N1 = (uniform(stream_N, position_N) * cdf_NB[:, -1]).unsqueeze(1)
    block_N1 = torch.searchsorted(cdf_NB, threshold_N1, right=True).clamp_(max=cdf_NB.shape[1] - 1)
    before_N1 = torch.where(block_N1 > 0, cdf_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    p_NK = p_NBK.gather(1, block_N1.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    inner_NK = before_N1 + p_NK.cumsum(dim=-1, dtype=torch.float64)
    at_N1 = torch.searchsorted(inner_NK, threshold_N1, right=True)
    # Two orders of the same sums: the block's own may end a hair below the threshold that chose the block.
    last_N1 = torch.where(p_NK > 0, torch.arange(BLOCK, device=p_NK.device), 0).amax(dim=-1, keepdim=True)
    token_N1 = (block_N1 * BLOCK + torch.minimum(at_N1, last_N1)).clamp(max=width - 1)
    return token_N1.squeeze(1), logp_NV.gather(1, token_N1).squeeze(1), torch.isfinite(logp_NV).all(dim=-1)


def triton_draw(logp_NV: Tensor, stream_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` in two kernels and one pass over the log-probabilities. Waits for nothing."""
    from onegrid.ops import draw_triton

    return draw_triton.draw(logp_NV, stream_N, position_N)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift_right(x_N: Tensor, bits: int) -> Tensor:
    return (x_N >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts the sign in
