"""Importance weights that correct for a sampler that is not quite the learner.

In an exact pairing every weight is 1 and none of this is needed; it is for pairings that are not exact and for tokens
of older versions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onegrid.errors import ConfigError

CORRECTIONS = ("off", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask")
LOG_RATIO_BOUND = 20.0


def correction_weights(
    learner_logp: Sequence[Tensor],
    sampler_logp: Sequence[Tensor],
    *,
    mask: Sequence[Tensor],
    mode: str,
    cap: float,
) -> list[Tensor]:
    """Weight of every token's policy-gradient term, per sequence FP32 [R], without gradient; 1 where masked.

    learner_logp, sampler_logp  per sequence FP32 [R], nats; masked positions may hold anything
    mode  with w = exp(learner - sampler), of a token or of all chosen tokens of its sequence together:
          "token_truncate", "sequence_truncate": min(w, cap)
          "token_mask", "sequence_mask": w up to the cap, 0 above: the token or sequence then teaches nothing
          "off": 1
    cap   at least 1

    Log-ratios are summed in float64 and clamped to +-20. A NaN stays NaN, for the loss to refuse. Whole sequences are
    needed, not whole steps, so micro-batches change nothing.
    Sources: Ionides, "Truncated Importance Sampling" (2008); Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training" (2025) for the token form and its cap of 2.
    """
    if mode not in CORRECTIONS:
        raise ConfigError(f'the correction is "{mode}"; allowed are {", ".join(CORRECTIONS)}')
    if not 1.0 <= cap < float("inf"):
        raise ConfigError(f"the cap of the correction is {cap}; it must be at least 1 and finite")
    return [
        _sequence_weights(p_R.detach(), q_R.detach(), mask_R.bool(), mode=mode, cap=cap)
        for p_R, q_R, mask_R in zip(learner_logp, sampler_logp, mask, strict=True)
    ]


def capped_share(weights: Sequence[Tensor], *, mask: Sequence[Tensor], cap: float) -> dict[str, float]:
    """Share of chosen tokens whose weight was cut to the cap or to 0, as a metric; empty if none is chosen."""
    chosen = [w_R[mask_R.bool()] for w_R, mask_R in zip(weights, mask, strict=True)]
    num = sum(w_N.numel() for w_N in chosen)
    if not num:
        return {}
    return {"train/correction_capped_share": sum(int(((w_N >= cap) | (w_N == 0)).sum()) for w_N in chosen) / num}


def _sequence_weights(p_R: Tensor, q_R: Tensor, mask_R: Tensor, *, mode: str, cap: float) -> Tensor:
    weight_R = torch.ones_like(p_R, dtype=torch.float32)
    if mode == "off":
        return weight_R
    log_ratio_C = p_R[mask_R].double() - q_R[mask_R].double()
    if mode.startswith("sequence"):
        log_ratio_C = log_ratio_C.sum().expand(log_ratio_C.shape)
    ratio_C = log_ratio_C.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    above = cap if mode.endswith("truncate") else 0.0
    weight_R[mask_R] = torch.where(ratio_C > cap, above, ratio_C).float()
    return weight_R
