"""The learner's forward over recorded tokens, with any of its parts taken from the sampler, or from its plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.learner.learner import Learner
from onegrid.learner.packing import attend_packed, pack
from onegrid.learner.replay import Replay
from onegrid.model.canonical import Canonical, parts_of
from onegrid.model.decoder import decode_rows, head_name
from onegrid.model.kv import kv_grid
from onegrid.model.live import LiveWeights
from onegrid.model.rope import rope_table
from onegrid.model.taps import Tapped, Taps
from onegrid.ops.logprob import token_logp
from onegrid.types import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What log-probabilities are computed with."""

    codes: LiveWeights
    """Whose weights."""
    activation: LiveWeights
    """Whose quantizers of activations."""
    sums: LiveWeights
    """Whose matmuls and kernels."""
    kv: str
    """Format of keys and values."""
    forced: bool = False
    """Visit the experts that the sampler recorded."""

    def weights(self) -> LiveWeights:
        """One object out of the three."""
        made = copy.copy(self.sums)
        made.held, made.operands, made.weights = self.codes.held, self.codes.operands, self.codes.weights
        made.activation, made.joined, made.packed, made.few = self.activation.activation, {}, None, None
        return made


@torch.no_grad()
def replay(
    side: Side,
    sequences: Items[Sequence],
    temperature: float,
    *,
    kept: Items[tuple[Tensor, ...] | None] | None = None,
    taps: Taps | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """FP32 [R] log-probabilities of every sequence's response, all in one pass.

    kept    per sequence the kept sets of a truncating sampler; None takes those of the sequences
    taps    gets the outputs on the way
    change  what becomes of every output of a linear or of attention
    """
    weights = side.weights()
    spec, device = weights.spec, weights.device
    packed = pack(sequences, align=1, device=device)
    routes = Replay(sequences, packed, forced=side.forced)
    attend = attend_packed(packed.segments, weights.kernels)
    tapped = None if taps is None and change is None else Tapped(weights, [] if taps is None else taps, change)
    hidden_ND = decode_rows(
        spec,
        tapped or weights,
        packed.rows,
        tapped.attend(attend) if tapped else attend,
        rope=rope_table(spec, int(packed.rows.positions_N.max()) + 1, device),
        routes=routes.found,
        forced_NLK=routes.forced_NLK,
        kv_grid=kv_grid(side.kv),
        kernels=weights.kernels,
    )
    sets = [s.kept for s in sequences] if kept is None else list(kept)
    head_VD = weights.tensor(head_name(spec))
    logp, _ = token_logp(
        hidden_ND[packed.predict_P], head_VD, packed.target_P, temperature=temperature, kept=_flat(sets, sequences)
    )
    return list(logp.split([len(s.tokens_T) - s.num_prompt for s in sequences]))


def sampler_side(learner: Learner) -> Side:
    """What the plan says the sampler computes with, at the learner's version, from the learner alone.

    The learner's own live weights, unless the plan is mixed: then a copy on the sampler's grid, for as long as it is
    held. Nothing of the running sampler is in it.
    """
    live = learner.live
    if learner.plan.mixed:
        live = weights_of(learner, learner.canonical())
    return Side(codes=live, activation=live, sums=live, kv=learner.plan.kv_cache)


def weights_of(learner: Learner, tensors: Mapping[str, Canonical]) -> LiveWeights:
    """Canonical tensors of a version as live weights of the sampler's side."""
    live = LiveWeights(learner.spec, learner.plan, side="sampler", device=learner.device)
    for name, tensor in tensors.items():
        for part, held in live.parts(name).items():
            held.copy_(parts_of(tensor)[part])
    live.derive()
    return live


def _flat(sets: Items[tuple[Tensor, ...] | None], sequences: Items[Sequence]) -> list[Tensor] | None:
    if all(each is None for each in sets):
        return None
    whole = torch.empty(0, dtype=torch.int64)
    out: list[Tensor] = []
    for each, s in zip(sets, sequences, strict=True):
        out += [whole] * (len(s.tokens_T) - s.num_prompt) if each is None else list(each)
    return out
