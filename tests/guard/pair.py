"""A learner with a proved engine, and one update at a time."""

from __future__ import annotations

from onegrid.guard.config import GuardConfig
from onegrid.guard.guard import Guard, GuardReport, guard_of, guard_sync
from onegrid.guard.injection import Bench
from onegrid.study.corruptions import update
from onegrid.study.pairing import make_bench


class Pair:
    """A bench under a guard."""

    def __init__(self, model: str = "moe", preset: str = "mxfp8", weights: str = "auto", **config: object) -> None:
        self.bench: Bench = make_bench(model, preset, weights=weights)
        self.learner, self.sampler = self.bench.learner, self.bench.sampler
        self.guard: Guard = guard_of(GuardConfig(**config), self.learner, self.sampler)  # type: ignore[arg-type]

    def update(self, seed: int = 0) -> None:
        """One optimizer step on random gradients."""
        update(self.bench, seed)

    def sync(self) -> GuardReport:
        """The learner's version into the sampler."""
        return guard_sync(self.learner, self.sampler, self.guard)
