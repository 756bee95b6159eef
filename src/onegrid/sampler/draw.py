"""How a token is drawn: one uniform number per token from a counter, then the inverse of the distribution.

The number depends on (seed, prompt_index, sample, position) and on nothing else, so neither the batch, its order nor
the number of slots can change a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onegrid.ops.draw import MIX, WEYL
from onegrid.types import Request, Sampling

_WORD = (1 << 64) - 1


def mix(word: int) -> int:
    """Finalizer of splitmix64 on 64-bit words. Source: Steele, Lea, Flood, "Fast splittable generators" (2014)."""
    for shift, multiplier in MIX:
        word = ((word ^ (word >> shift)) * multiplier) & _WORD
    return word ^ (word >> 31)


def stream(request: Request) -> int:
    """64-bit name of the random stream of one completion: seed, prompt_index and sample absorbed one after another.

    Each is added times WEYL to the state before mixing, in that order, modulo 2^64; negative ones count modulo 2^64.
    """
    state = 0
    for word in (request.seed, request.prompt_index, request.sample):
        state = mix((state + (word + 1) * WEYL) & _WORD)
    return state


def streams(requests: Sequence[Request], device: torch.device) -> Tensor:
    """`stream` of every request as int64 of the same bits."""
    words = [stream(request) for request in requests]
    return torch.tensor([w - (1 << 64) if w >> 63 else w for w in words], dtype=torch.int64, device=device)


def inverse_cdf(logp_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """First id, in vocabulary order, whose cumulative probability exceeds uniform times the total. int64.

    logp_NV    FP32 log-probabilities; -inf has probability zero and is never drawn
    uniform_N  FP64 in [0, 1), see `ops.draw.uniform`
    Probabilities are exp in FP32, summed in FP64 in ascending id. uniform * total stays below total, because uniform
    is at most 1 - 2^-53 and the product then rounds to a neighbour below.
    """
    cdf_NV = logp_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold_N1 = (uniform_N * cdf_NV[:, -1]).unsqueeze(1)
    return torch.searchsorted(cdf_NV, threshold_N1, right=True).squeeze(1)


def truncates(sampling: Sampling) -> bool:
    """True where top-p or top-k can leave tokens out. Greedy decoding looks at the largest only, so it never does."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def kept_set(logp_NV: Tensor, sampling: Sampling) -> Tensor:
    """bool [N, V]: what top-k, and then top-p on its renormalized rest, leave of the distribution.

    logp_NV  FP32 log-probabilities at the sampling temperature, not truncated
    top-k keeps the k most likely (ties to the lower id). top-p keeps, from the most likely down, every token before
    which less than top_p has been summed (FP64), so at least one.
    """
    sorted_NV, order_NV = logp_NV.sort(dim=-1, descending=True, stable=True)
    keep_NV = torch.ones_like(sorted_NV, dtype=torch.bool)
    if sampling.top_k > 0:
        keep_NV[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        p_NV = sorted_NV.exp().double().masked_fill(~keep_NV, 0.0)
        sum_NV = p_NV.cumsum(dim=-1)
        keep_NV &= sum_NV - p_NV < sampling.top_p * sum_NV[:, -1:]
        keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV)
