"""Where in the forward pass what serves leaves the plan: every linear and attention, on the tokens of a few sequences.

A difference of log-probabilities says that something is wrong and not where. A sampler that can show what its layers
give (`trace`, the embedded engine) is asked for some sequences of the batch, through what it serves with; a replay on
the plan's grids gives the same places from the learner's bytes. Both pack the same rows, so that scales of a whole
batch agree too, and every place has equal bytes while all is well. The first that has not is where a fault comes in;
groups of layers after it only pass it on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onegrid.guard.replay import replay, sampler_side
from onegrid.learner.learner import Learner
from onegrid.mismatch.attribution import Apart, apart
from onegrid.model.taps import Taps
from onegrid.sampler.base import Sampler
from onegrid.types import Sequence as Training


def can_trace(sampler: Sampler) -> bool:
    """Whether a sampler shows what its layers give."""
    return hasattr(sampler, "trace")


@torch.no_grad()
def differing_places(learner: Learner, sampler: Sampler, sequences: Sequence[Training]) -> list[Apart]:
    """Places, in forward order, whose bytes are not those of a replay; only those up to a different choice of experts.

    sequences  at least one, each of two tokens or more
    """
    expected: Taps = []
    replay(sampler_side(learner), sequences, 1.0, taps=expected)
    tokens = [tuple(s.tokens_T[:-1].tolist()) for s in sequences]
    return apart(expected, sampler.trace(tokens))  # type: ignore[attr-defined]


def describe(learner: Learner, places: Sequence[Apart]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tensors of the first place (none where it is an attention), and lines on the first place of every layer."""
    if not places:
        return (), ()
    firsts: dict[str, Apart] = {}
    for place in places:
        firsts.setdefault(".".join(place.name.split(".")[:3]), place)
    lines = [f"first {places[0].name}"]
    lines += [f"{p.name}: apart by {p.relative:.3g} of its size, at most {p.max_abs:.3g}" for p in firsts.values()]
    return tuple(learner.keys.get(places[0].name, ())), tuple(lines[:8])
