"""From replays to a cause: the same tokens again with one thing changed at a time, and what is left of the mismatch.

A replay in which the learner takes over one thing of the sampler (its weights, its grid of activations, its cache) is
as far from the sampler as before if that thing is not the cause, and nearer, or equal to the last bit, if it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.errors import MismatchError

LEAST = 0.1
"""Share of the mismatch that a cause must explain to be named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """How far a replay is from what the sampler reported, over chosen tokens."""

    share_equal: float
    """Of log-probabilities with the same bits."""
    mean_abs: float
    """Nats."""
    max_abs: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One thing that was changed."""

    name: str
    left: Residual
    explained: float
    """1 - what is left of the mean absolute difference; 1 is all, below 0 it made things worse."""


def residual(logp: Sequence[Tensor], sampler_logp: Sequence[Tensor], masks: Sequence[Tensor]) -> Residual:
    """FP32 [R] a sequence on both sides, bool masks. MismatchError without a chosen token; NaN stays NaN."""
    one, other = (
        torch.cat([x.detach().cpu().float()[m.cpu()] for x, m in zip(side, masks, strict=True)])
        for side in (logp, sampler_logp)
    )
    if not one.numel():
        raise MismatchError("no token takes part in the comparison; look at the mask")
    apart = (one.double() - other.double()).abs()
    equal = (one.view(torch.int32) == other.view(torch.int32)).double().mean()
    return Residual(share_equal=equal.item(), mean_abs=apart.mean().item(), max_abs=apart.max().item())


def attribute(before: Residual, replays: Mapping[str, Residual]) -> list[Cause]:
    """Causes, that which explains most first; in the given order where they explain alike."""
    causes = [
        Cause(name=name, left=left, explained=1 - left.mean_abs / before.mean_abs if before.mean_abs else 0.0)
        for name, left in replays.items()
    ]
    return sorted(causes, key=lambda c: (-c.left.share_equal if c.left.share_equal == 1 else 0.0, -c.explained))


def main_cause(causes: Sequence[Cause]) -> Cause | None:
    """The first, if it explains at least LEAST of the mismatch."""
    return causes[0] if causes and causes[0].explained >= LEAST else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """One place of the forward pass where two sides differ."""

    name: str
    """Canonical name of the linear, or of the attention, whose output it is."""
    relative: float
    """Euclidean norm of the difference over that of the first side; infinite where shapes differ."""
    max_abs: float


def apart(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> list[Apart]:
    """Every place, in forward order, whose outputs differ in a bit. The first is where the mismatch comes in.

    Stops at a place where the two sides have other names or shapes: from there on tokens went other ways.
    """
    found: list[Apart] = []
    for (name, x), (theirs, y) in zip(one, other, strict=False):
        if name != theirs or x.shape != y.shape:
            return [*found, Apart(name=name, relative=float("inf"), max_abs=float("inf"))]
        if x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)):
            continue
        difference = x.double() - y.double()
        norm = float(x.double().norm())
        relative = float(difference.norm()) / norm if norm else float("inf")
        found.append(Apart(name=name, relative=relative, max_abs=float(difference.abs().max())))
    return found
