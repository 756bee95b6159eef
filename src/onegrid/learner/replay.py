"""Experts that the sampler recorded, for the learner: to compare with its own choice, or to visit in its place.

In an exact pairing the router sees the same bits on both sides, so what is recomputed equals what was recorded, and
replaying it changes nothing. In others a replay keeps the learner on the sampler's experts.
Source: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.learner.packing import Packed
from onegrid.types import Sequence


class Replay:
    """The recorded experts of one micro-batch; none where no sequence has any.

    forced  visit them, instead of comparing only
    Raises CapabilityError where they are to be visited and a sequence has none.
    """

    def __init__(self, sequences: Items[Sequence], packed: Packed, *, forced: bool) -> None:
        held = [s.routing_RLE for s in sequences]
        if forced and any(routing is None for routing in held):
            raise CapabilityError(
                "learner.replay_routing: a sequence came without its routing; set sampling.record_routing = true, "
                "or leave replay_routing out"
            )
        self.packed = packed
        self.recorded_PLK: Tensor | None = None
        shape = next((routing.shape[1:] for routing in held if routing is not None), None)
        if shape is not None:
            parts = [
                torch.full((len(s.sampler_logp_R), *shape), -1, dtype=torch.int16) if routing is None else routing.cpu()
                for s, routing in zip(sequences, held, strict=True)
            ]
            self.recorded_PLK = torch.cat(parts).to(packed.predict_P.device)
        self.found: list[Tensor] | None = None if self.recorded_PLK is None else []
        """Gets int16 [N, K] a layer, what the routers choose here."""
        self.forced_NLK = self._forced() if forced else None

    def _forced(self) -> Tensor:
        """[N, L, K] of all rows, -1 where nothing was recorded: in prompts before their last token, in padding."""
        assert self.recorded_PLK is not None
        shape = (len(self.packed.rows.tokens_N), *self.recorded_PLK.shape[1:])
        forced_NLK = torch.full(shape, -1, dtype=torch.int16, device=self.recorded_PLK.device)
        forced_NLK[self.packed.predict_P] = self.recorded_PLK
        return forced_NLK

    def equal(self) -> Tensor | None:
        """int64 [2]: choices made here that are the recorded ones, and recorded ones; None where none is recorded."""
        if self.recorded_PLK is None or not self.found:
            return None
        num_layers = self.recorded_PLK.shape[1]
        found_PLK = torch.stack(self.found[:num_layers], dim=1)[self.packed.predict_P]
        known = self.recorded_PLK >= 0
        return torch.stack([((found_PLK == self.recorded_PLK) & known).sum(), known.sum()])


def routing_metrics(routed: Items[Tensor | None]) -> dict[str, float]:
    """`mismatch/routing_share_equal` of a step, from `Replay.equal` of its micro-batches; empty without records."""
    counts = [each for each in routed if each is not None]
    if not counts:
        return {}
    equal, total = torch.stack(counts).sum(0).tolist()
    return {"mismatch/routing_share_equal": equal / total} if total else {}
