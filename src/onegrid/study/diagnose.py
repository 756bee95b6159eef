"""Why learner and sampler differ: one batch, replayed with one thing of the sampler at a time."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from torch import Tensor

from onegrid.guard.replay import Side, replay
from onegrid.learner.learner import Learner
from onegrid.mismatch.attribution import Apart, Cause, Residual, apart, attribute, main_cause, residual
from onegrid.model.live import LiveWeights
from onegrid.model.taps import Taps
from onegrid.sampler.engine import Engine
from onegrid.types import Batch

WEIGHTS, ACTIVATIONS, SUMS = "weights on another grid", "activations on another grid", "another order of sums"
CACHE, ROUTING = "keys and values on another grid", "other experts"
TRUNCATION, STALENESS = "a truncated sampling distribution", "weights of an older version"
_ELSEWHERE = "none of these; look at temperature, seeds and tokens"
TOGETHER = "all of the sampler's together"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What came of the replays."""

    before: Residual
    """Learner against what the sampler reported."""
    causes: tuple[Cause, ...]
    """Each alone, that which explains most first."""
    together: Residual
    reasons: tuple[str, ...]
    """Why the plan promises no equal bits; empty where it does."""
    places: tuple[Apart, ...]
    """Where the two forward passes differ, in forward order, with everything of the sampler on the other side."""

    @property
    def cause(self) -> Cause | None:
        """The one to look at; None where the two are equal, or nothing explains the difference."""
        return None if self.before.share_equal == 1 else main_cause(self.causes)

    def lines(self) -> list[str]:
        """For people."""
        b = self.before
        out = [f"{b.share_equal:.2%} of log-probabilities equal; mean {b.mean_abs:.3g}, largest {b.max_abs:.3g} nats"]
        if b.share_equal == 1:
            return [*out, "learner and sampler are one policy, to the last bit"]
        found = self.cause
        other = "none of these alone; the plan leaves it open" if self.reasons else _ELSEWHERE
        out.append(f"cause: {found.name if found else other}")
        out += [f"  the plan says: {reason}" for reason in self.reasons]
        for c in self.causes:
            out.append(f"  {c.name:34} explains {c.explained:7.1%}, leaves {c.left.mean_abs:.3g} nats")
        out.append(f"  {TOGETHER:34} leaves {self.together.mean_abs:.3g} nats")
        for place in self.places[:8]:
            out.append(f"  {place.name}: apart by {place.relative:.3g} of its size, at most {place.max_abs:.3g}")
        return out


def diagnose(
    learner: Learner,
    sampler: Engine,
    batch: Batch,
    *,
    kept: Items[tuple[Tensor, ...] | None] | None = None,
    older: LiveWeights | None = None,
) -> Diagnosis:
    """Replays `batch`, which `sampler` made, with the learner's parts and then with one of the sampler's at a time.

    kept   kept sets that the sampler used, where the batch does not carry them
    older  weights of the version before, on the sampler's grid: see `weights_of`
    """
    mine, theirs = learner.live, sampler.weights
    base = Side(codes=mine, activation=mine, sums=mine, kv=learner.plan.learner_kv)
    cache = sampler.reads().kv_cache
    sides = {
        WEIGHTS: replace(base, codes=theirs),
        ACTIVATIONS: replace(base, activation=theirs),
        SUMS: replace(base, sums=theirs),
        CACHE: replace(base, kv=cache),
    }
    recorded = any(s.routing_RLE is not None for s in batch.sequences)
    if recorded and all(s.routing_RLE is not None for s in batch.sequences):
        sides[ROUTING] = replace(base, forced=True)
    if older is not None:
        sides[STALENESS] = replace(base, codes=older)
    logp = [s.sampler_logp_R for s in batch.sequences]
    masks = [s.mask_R for s in batch.sequences]

    def left(side: Side, sets: Items[tuple[Tensor, ...] | None] | None = None, taps: Taps | None = None) -> Residual:
        return residual(replay(side, batch.sequences, batch.temperature, kept=sets, taps=taps), logp, masks)

    ours: Taps = []
    before = left(base, taps=ours)
    replays = {name: left(side) for name, side in sides.items() if side != base}
    if kept is not None:
        replays[TRUNCATION] = left(base, kept)
    others: Taps = []
    whole = Side(codes=older or theirs, activation=theirs, sums=theirs, kv=cache)
    together = left(whole, kept, taps=others)
    causes = attribute(before, replays)
    return Diagnosis(
        before=before,
        causes=tuple(causes),
        together=together,
        reasons=tuple(learner.plan.reasons),
        places=tuple(apart(ours, others)),
    )
