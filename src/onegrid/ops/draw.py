"""The draw of a token from log-probabilities on a GPU: sums in two levels, blocks of ids and the ids of one block."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512
"""Ids that are added up first."""


def draw(logp_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First id whose cumulative probability exceeds uniform times the total: int64 [N]; its log-probability; finite.

    logp_NV    FP32 log-probabilities; -inf has probability zero and is never drawn
    uniform_N  FP64 in [0, 1)
    finite     bool [N]: every log-probability of the row is
    FP64 sums of blocks, then of the ids inside the block that holds the threshold. The order of sums is not that of a
    single running sum, so a threshold within some 1e-13 of a boundary may fall on its other side; the distribution is
    the same. A row with NaN draws some id of the vocabulary.
    """
    num_rows, width = logp_NV.shape
    p_NV = torch.nn.functional.pad(logp_NV.exp(), (0, -width % BLOCK))
    p_NBK = p_NV.view(num_rows, -1, BLOCK)
    cdf_NB = p_NBK.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold_N1 = (uniform_N * cdf_NB[:, -1]).unsqueeze(1)
    block_N1 = torch.searchsorted(cdf_NB, threshold_N1, right=True).clamp_(max=cdf_NB.shape[1] - 1)
    before_N1 = torch.where(block_N1 > 0, cdf_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    p_NK = p_NBK.gather(1, block_N1.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    inner_NK = before_N1 + p_NK.cumsum(dim=-1, dtype=torch.float64)
    at_N1 = torch.searchsorted(inner_NK, threshold_N1, right=True)
    # Two orders of the same sums: the block's own may end a hair below the threshold that chose the block.
    last_N1 = torch.where(p_NK > 0, torch.arange(BLOCK, device=p_NK.device), 0).amax(dim=-1, keepdim=True)
    token_N1 = (block_N1 * BLOCK + torch.minimum(at_N1, last_N1)).clamp(max=width - 1)
    return token_N1.squeeze(1), logp_NV.gather(1, token_N1).squeeze(1), torch.isfinite(logp_NV).all(dim=-1)


def triton_draw(logp_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` in two kernels and one pass over the log-probabilities. Waits for nothing."""
    from onegrid.ops import draw_triton

    return draw_triton.draw(logp_NV, uniform_N)
