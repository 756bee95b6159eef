"""Rounding of E2M1 other than to nearest even: stochastic, and the two ways in which some engines break ties."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onegrid.formats.casts import E2M1

HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def round_stochastic(magnitude: Tensor, random_bits: Tensor) -> Tensor:
    """E2M1 magnitudes: up or down with a probability by distance, in steps of 1/256.

    magnitude    FP32 >= 0, already scaled
    random_bits  0..255 of the same shape; 0 rounds everything down
    t = |x| + bits/256 step, with a step of .5 below 2, 1 below 4, else 2; then down to the step of t, at most 6.
    Source: Transformer Engine 2.20, software fallback. Hardware draws its bits in another order.
    """
    magnitude = magnitude.clamp(max=E2M1.max)  # 6 and beyond give 6 whatever the bits
    raised = magnitude + random_bits.float() * (_step(magnitude) / 256)
    step = _step(raised)
    return ((raised / step).floor() * step).clamp_(max=E2M1.max)


def round_ties(magnitude: Tensor, ties: Literal["away", "zero"]) -> Tensor:
    """E2M1 magnitudes to nearest; halfway values go away from zero or toward it. NaN and Inf give 6."""
    values = torch.zeros_like(magnitude)
    previous = 0.0
    for halfway, value in zip(HALFWAY, (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), strict=True):
        above = magnitude >= halfway if ties == "away" else magnitude > halfway
        values = values + above * (value - previous)
        previous = value
    return torch.where(magnitude.isnan(), E2M1.max, values)


def _step(magnitude: Tensor) -> Tensor:
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
