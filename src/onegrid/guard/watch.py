"""The sentinel of a step (C6), all of it: finite numbers, the expectation of the pairing, layers where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from onegrid.errors import CapabilityError, SyncError
from onegrid.guard.chart import Detector
from onegrid.guard.layers import describe, differing_places
from onegrid.guard.prediction import chosen, predict
from onegrid.guard.sentinel import CHECK, CONDITION, RUN_LENGTH, Sentinel
from onegrid.guard.verdict import Verdict, closed, failed
from onegrid.learner.learner import Learner
from onegrid.sampler.base import Sampler
from onegrid.types import Batch


@dataclass
class Watch:
    """What the sentinel of one run remembers from step to step.

    every   versions from replay to replay; 0: none
    num     sequences of a replay
    band    see `prediction.predict`
    traces  compare layers at each replay's turn
    """

    sentinel: Sentinel
    sampler: Sampler
    every: int
    num: int
    band: float
    traces: bool
    detector: Detector = field(default_factory=lambda: Detector(RUN_LENGTH))
    last: tuple[int, Verdict] | None = None
    """Version and verdict of the last replay."""

    def judge(self, mismatch: Mapping[str, float], batch: Batch, learner: Learner, logp: Sequence[Tensor]) -> Verdict:
        """The verdict on a batch that the learner's present version sampled.

        mismatch  metrics of `mismatch.metrics.compare`; empty where no token takes part in the loss
        logp      FP32 [R] per sequence, of the learner
        """
        exact, calibrated = self.sentinel.exact, self.sentinel.expectation is not None
        replays = bool(self.every) and not exact
        if not mismatch or exact or calibrated or not replays:
            verdict = self.sentinel.judge(mismatch)
        else:
            verdict = self.sentinel.finite(mismatch)
        if mismatch and replays and verdict.passed:
            verdict = self._replayed(batch, learner, logp)
        if mismatch and self.traces and (not verdict.passed or self._is_due(learner.version)):
            verdict = self._located(verdict, batch, learner)
        return verdict

    def _is_due(self, version: int) -> bool:
        return version % max(1, self.every) == 0

    def _replayed(self, batch: Batch, learner: Learner, logp: Sequence[Tensor]) -> Verdict:
        if self.last is not None and not self._is_due(learner.version):
            version, verdict = self.last
            return replace(verdict, found=f"not its turn; at version {version}: {verdict.found}")
        can = self.sampler.capabilities

        def replayed() -> Verdict:
            return predict(
                learner, batch, logp, bits=can.bits, num=self.num, band=self.band, detector=self.detector
            )  # fmt: skip

        verdict = closed(CHECK, CONDITION, replayed)
        self.last = (learner.version, verdict)
        return verdict

    def _located(self, verdict: Verdict, batch: Batch, learner: Learner) -> Verdict:
        """The verdict with the first place that differs; a failure where only the places differ."""
        indices = chosen(batch, self.num, turn=learner.version)
        some = replace(batch, sequences=tuple(batch.sequences[i] for i in indices))
        if not verdict.passed:
            return locate(verdict, learner, self.sampler, some)

        def located() -> Verdict:
            tensors, lines = describe(learner, differing_places(learner, self.sampler, some.sequences))
            if not lines:
                return verdict
            return failed(
                CHECK,
                CONDITION,
                tensors=tensors,
                expected="layers that give the bytes of a replay on the plan's grids",
                found="other bytes from one place on",
                where=lines,
                cause=_LAYER,
            )

        return closed(CHECK, CONDITION, located)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep: charts that began anew at every resume would never reach their limits."""
        state: dict[str, Any] = {"sums": dict(self.sentinel.sums), "capital": dict(self.detector.capital)}
        if self.last is not None:
            version, verdict = self.last
            state["last"] = [version, verdict.status, verdict.expected, verdict.found]
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes it back. KeyError, TypeError or ValueError for something else."""
        self.sentinel.sums = {str(k): float(v) for k, v in state["sums"].items()}
        self.detector.capital = {str(k): float(v) for k, v in state["capital"].items()}
        if "last" in state:
            version, status, expected, found = state["last"]
            self.last = (
                int(version),
                Verdict(check=CHECK, condition=CONDITION, status=status, expected=expected, found=found),
            )


def locate(verdict: Verdict, learner: Learner, sampler: Sampler, batch: Batch) -> Verdict:
    """A failed verdict with the first place of the forward pass that differs, where the sampler shows its layers."""
    try:
        tensors, lines = describe(learner, differing_places(learner, sampler, batch.sequences))
    except (CapabilityError, SyncError, AttributeError, TypeError, ValueError) as error:
        return replace(verdict, where=(f"layers could not be compared: {type(error).__name__}: {error}",))
    return replace(verdict, tensors=tensors, where=lines)


_LAYER = "one layer of what serves computes otherwise than its weights say: a kernel, or state that is no tensor's"
