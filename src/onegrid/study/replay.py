"""The learner's forward over recorded tokens, with any of its parts taken from the sampler."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onegrid.learner.packing import attend_packed, pack
from onegrid.learner.replay import Replay
from onegrid.model.decoder import decode_rows, head_name
from onegrid.model.kv import kv_grid
from onegrid.model.live import LiveWeights
from onegrid.model.rope import rope_table
from onegrid.ops.grouped import Dispatch
from onegrid.ops.logprob import token_logp
from onegrid.types import Sequence

Taps = list[tuple[str, Tensor]]
"""Outputs of linears and of attention, by name, in forward order."""


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
        made.activation, made.joined, made.packed = self.activation.activation, {}, None
        return made


@torch.no_grad()
def replay(
    side: Side,
    sequences: Items[Sequence],
    temperature: float,
    *,
    kept: Items[tuple[Tensor, ...] | None] | None = None,
    taps: Taps | None = None,
) -> list[Tensor]:
    """FP32 [R] log-probabilities of every sequence's response, all in one pass.

    kept  per sequence the kept sets of a truncating sampler; None takes those of the sequences
    taps  gets the outputs on the way
    """
    weights = side.weights()
    spec, device = weights.spec, weights.device
    packed = pack(sequences, align=1, device=device)
    routes = Replay(sequences, packed, forced=side.forced)
    attend = attend_packed(packed.segments, weights.kernels)

    def tapped(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(layer, q, k, v)
        if taps is not None:
            taps.append((f"model.layers.{layer}.self_attn", out))
        return out

    hidden_ND = decode_rows(
        spec,
        weights if taps is None else _Tapped(weights, taps),
        packed.rows,
        tapped,
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


@dataclass
class _Tapped:
    """Weights that note what their linears give."""

    weights: LiveWeights
    taps: Taps = field(default_factory=list)

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(name)

    def linear(
        self, keys: tuple[str, ...], x: Tensor, dispatch: Dispatch | None = None, *, sent: bool = False
    ) -> list[Tensor]:
        out = self.weights.linear(keys, x, dispatch, sent=sent)
        self.taps += zip(keys, out, strict=True)
        return out

    def __getattr__(self, name: str):
        return getattr(self.weights, name)


def _flat(sets: Items[tuple[Tensor, ...] | None], sequences: Items[Sequence]) -> list[Tensor] | None:
    if all(each is None for each in sets):
        return None
    whole = torch.empty(0, dtype=torch.int64)
    out: list[Tensor] = []
    for each, s in zip(sets, sequences, strict=True):
        out += [whole] * (len(s.tokens_T) - s.num_prompt) if each is None else list(each)
    return out
