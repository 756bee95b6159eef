"""The policy-gradient term of every token, by name: which ratio, and what a clip does to it.

One function an algorithm. Each takes chosen tokens only and returns the loss of each of them, before any weight, and
sums for the metrics: of ratios, and of tokens that a clip took effect on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20: past it the ratio stays finite and passes no gradient."""

Terms = tuple[Tensor, dict[str, Tensor]]


class Clips(Protocol):
    """Of `LossConfig`."""

    @property
    def clip_low(self) -> float:
        """Below 1."""
        ...

    @property
    def clip_high(self) -> float:
        """Above 1."""
        ...

    @property
    def clip_dual(self) -> float | None:
        """Limit for negative advantages."""
        ...


def ppo(logp_C: Tensor, old_logp_C: Tensor, *, advantage_C: Tensor, counts: Sequence[int], clips: Clips) -> Terms:
    """max(-A r, -A clip(r)) with r the ratio of the token, at most -A clip_dual where A < 0.

    Sources: Schulman et al., PPO (2017); Yu et al., DAPO (2025) for two different clips; Ye et al. (2020) for the dual.
    """
    ratio_C = (logp_C - old_logp_C).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _clipped(ratio_C, advantage_C, clips)


def gspo(logp_C: Tensor, old_logp_C: Tensor, *, advantage_C: Tensor, counts: Sequence[int], clips: Clips) -> Terms:
    """As PPO, with one ratio for all tokens of a sequence: exp of the mean of their log-ratios.

    counts  chosen tokens of every sequence, in order; each mean is over its own sequence alone, in float64
    Ratios lie near 1, so that the paper clips at 3e-4 below and 4e-4 above. With the aggregation "seq_mean_token_mean"
    this is the paper's objective. Source: Zheng et al., "Group Sequence Policy Optimization" (2025).
    """
    difference_C = (logp_C - old_logp_C).double()
    means = [d.mean().expand(len(d)) for d in difference_C.split([n for n in counts if n])]
    mean_C = torch.cat(means) if means else difference_C
    ratio_C = mean_C.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().float()
    return _clipped(ratio_C, advantage_C, clips)


def cispo(logp_C: Tensor, old_logp_C: Tensor, *, advantage_C: Tensor, counts: Sequence[int], clips: Clips) -> Terms:
    """-A clip(r) logp, where no gradient flows through the ratio: a clipped token still teaches, with a bounded weight.

    A clip_low of 1 leaves only the upper bound, as in the paper.
    Source: MiniMax, "MiniMax-M1" (2025), section 3.1.
    """
    ratio_C = (logp_C.detach() - old_logp_C).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    low, high = 1.0 - clips.clip_low, 1.0 + clips.clip_high
    sums = {
        "ratio": ratio_C.double().sum(),
        "clip_low": (ratio_C < low).sum(),
        "clip_high": (ratio_C > high).sum(),
    }
    return -advantage_C * ratio_C.clamp(low, high) * logp_C, sums


POLICIES: dict[str, Callable[..., Terms]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def _clipped(ratio_C: Tensor, advantage_C: Tensor, clips: Clips) -> Terms:
    low, high = 1.0 - clips.clip_low, 1.0 + clips.clip_high
    pg_C = torch.maximum(-advantage_C * ratio_C, -advantage_C * ratio_C.clamp(low, high))
    sums = {
        "ratio": ratio_C.double().sum(),
        "clip_low": ((advantage_C < 0) & (ratio_C < low)).sum(),
        "clip_high": ((advantage_C > 0) & (ratio_C > high)).sum(),
    }
    if clips.clip_dual is not None:
        limit_C = -advantage_C * clips.clip_dual
        over_C = (advantage_C < 0) & (pg_C > limit_C)
        pg_C = torch.where(over_C, limit_C, pg_C)
        sums["clip_dual"] = over_C.sum()
    return pg_C, sums
