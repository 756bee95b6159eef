"""When a batch is made, and where it is proved that learner and sampler were one policy when it was.

On policy: draw, learn, publish. The learner's own forward pass is the proof.
One step off: while the learner learns from a batch, the sampler makes the next one with the version that it has. Each
batch is proved by a forward pass of its own, before the update takes the learner to another version; the ratio of the
loss then leads from the version that sampled to the one that learns, and rl/correction.py can bound it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from onegrid.guard.guard import Guard, check_step
from onegrid.guard.verdict import Verdict
from onegrid.learner.learner import Learner
from onegrid.mismatch.metrics import compare, mirror_rollout_corr
from onegrid.rl.checkpoint import contents
from onegrid.rl.clock import Clock
from onegrid.rl.dynamic import Drawn
from onegrid.rl.experience import Experience
from onegrid.rl.loop_config import LoopConfig
from onegrid.rl.stored_rollouts import drawn_of, state_of
from onegrid.types import Batch, Sampling

Draw = Callable[[int, Clock], Drawn]
"""Groups of a step."""
Make = Callable[[Drawn, int], Experience]
"""Their batch."""
Prove = Callable[[Batch, Sequence[Tensor]], tuple[dict[str, float], list[Verdict]]]
"""`measure` of a learner and guard."""


class Schedule(Protocol):
    """The order of drawing and learning."""

    def take(self, step: int, clock: Clock) -> Experience:
        """What the step learns from."""

    def prove(self, logp: Sequence[Tensor], clock: Clock) -> tuple[dict[str, float], list[Verdict]]:
        """Mismatch of that batch at the version that sampled it, and verdicts; call it before the update.

        logp  FP32 [R] per sequence, of the learner's forward pass in this step
        Raises FailedChecks, for this batch or for one that was made meanwhile.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of it."""

    def __enter__(self) -> Schedule:
        """Nothing begins before the first `take`."""

    def __exit__(self, *exc: object) -> None:
        """Waits for what goes on in the background."""


def schedule_of(
    config: LoopConfig,
    draw: Draw,
    make: Make,
    learner: Learner,
    guard: Guard,
    *,
    sampling: Sampling,
    replayed: bool,
    overlap: bool,
    state: dict[str, Any] | None,
) -> Schedule:
    """The schedule of a configuration.

    replayed  rollouts are read, not sampled; those of other versions than the learner's have no mismatch to measure
    overlap   see `OneStepOff`
    state     of the checkpoint that the run goes on from
    """
    prove = partial(measure, learner, guard, replayed=replayed)
    if not config.off_policy_steps:
        return OnPolicy(draw, make, prove)
    ahead = (state or {}).get("ahead")
    return OneStepOff(
        draw,
        make,
        prove,
        learner,
        last=config.num_steps,
        overlap=overlap and not replayed,
        sampling=sampling,
        state=ahead,
    )


def measure(
    learner: Learner, guard: Guard, batch: Batch, logp: Sequence[Tensor], *, replayed: bool = False
) -> tuple[dict[str, float], list[Verdict]]:
    """Mismatch of a batch that the learner's present version sampled, and the verdicts on it."""
    sequences = batch.sequences
    if replayed and any(bool((s.version_R != learner.version).any()) for s in sequences):
        return staleness(batch, logp, version=learner.version), []
    apart = compare(logp, [s.sampler_logp_R for s in sequences], [s.mask_R for s in sequences])
    return apart | mirror_rollout_corr(apart), check_step(guard, apart, batch, learner=learner, logp=logp)


class OnPolicy:
    """Each batch is drawn in its own step."""

    def __init__(self, draw: Draw, make: Make, prove: Prove) -> None:
        self._draw, self._make, self._prove = draw, make, prove

    def take(self, step: int, clock: Clock) -> Experience:
        """See `Schedule`."""
        with clock("rollout"):
            drawn = self._draw(step, clock)
        with clock("reference"):
            self._now = self._make(drawn, step)
        return self._now

    def prove(self, logp: Sequence[Tensor], clock: Clock) -> tuple[dict[str, float], list[Verdict]]:
        """See `Schedule`."""
        return self._prove(self._now.batch, logp)

    def state(self) -> dict[str, Any]:
        """Nothing: the next batch is drawn from weights, seed and step."""
        return {}

    def __enter__(self) -> OnPolicy:
        """See `Schedule`."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """A batch that is made and proved, and not yet learned from."""

    step: int
    experience: Experience
    metrics: dict[str, float]
    verdicts: list[Verdict]


class OneStepOff:
    """Each batch but the first is drawn during the step before.

    last      the last step, during which nothing is drawn ahead
    overlap   draw in a thread, while this one learns. Captured graphs cannot share a device with other work while they
              are captured, so there drawing and learning take turns; scoring goes on in its processes all the same
    sampling  of the requests, which a checkpoint does not repeat
    state     what `state` of an earlier object gave
    """

    def __init__(
        self,
        draw: Draw,
        make: Make,
        prove: Prove,
        learner: Learner,
        *,
        last: int,
        overlap: bool,
        sampling: Sampling,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._draw, self._make, self._prove, self._learner = draw, make, prove, learner
        self._last = last
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, "ahead", torch.set_num_threads, (threads,)) if overlap else None
        self._future: Future[tuple[Drawn, Clock]] | None = None
        self._ahead: Ahead | None = None
        if state:
            with contents():
                drawn = drawn_of(state["rollouts"], sampling)
                verdicts = [Verdict(check=c, condition=k, status=s) for c, k, s in state["verdicts"]]
                step, metrics = state["step"], dict(state["metrics"])
            self._ahead = Ahead(step=step, experience=make(drawn, step), metrics=metrics, verdicts=verdicts)

    def take(self, step: int, clock: Clock) -> Experience:
        """See `Schedule`. Begins to draw for the next step."""
        if self._ahead is None:
            with clock("wait"):
                drawn, spent = self._timed(step)
            clock.add(spent)
            self._ahead = self._proved(step, drawn, clock)
        self._now, self._ahead = self._ahead, None
        assert self._now.step == step
        if step < self._last:
            if self._pool is not None:
                self._future = self._pool.submit(self._timed, step + 1)
            else:
                self._future = Future()
                with clock("wait"):
                    self._future.set_result(self._timed(step + 1))
        return self._now.experience

    def prove(self, logp: Sequence[Tensor], clock: Clock) -> tuple[dict[str, float], list[Verdict]]:
        """See `Schedule`. Waits for the next batch and proves it; the present one was proved when it was made."""
        if self._future is not None:
            with clock("wait"):
                drawn, spent = self._future.result()
            clock.add(spent)
            self._future = None
            self._ahead = self._proved(self._now.step + 1, drawn, clock)
        stale = staleness(self._now.experience.batch, logp, version=self._learner.version)
        return self._now.metrics | stale, self._now.verdicts

    def state(self) -> dict[str, Any]:
        """The batch that is ahead, whole: the weights that made it are gone when a run resumes."""
        if self._ahead is None:
            return {}
        ahead = {
            "step": self._ahead.step,
            "rollouts": state_of(self._ahead.experience.drawn),
            "metrics": self._ahead.metrics,
            "verdicts": [[v.check, v.condition, v.status] for v in self._ahead.verdicts],
        }
        return {"ahead": ahead}

    def __enter__(self) -> OneStepOff:
        """See `Schedule`."""
        return self

    def __exit__(self, *exc: object) -> None:
        """See `Schedule`."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, step: int) -> tuple[Drawn, Clock]:
        """Groups, and a clock of their own: stages of two threads on one would take each other for nested."""
        with (clock := Clock())("rollout"):
            drawn = self._draw(step, clock)
        return drawn, clock

    def _proved(self, step: int, drawn: Drawn, clock: Clock) -> Ahead:
        with clock("reference"):
            experience = self._make(drawn, step)
        with clock("logprob"):
            logp = self._learner.log_probs(experience.batch)
        metrics, verdicts = self._prove(experience.batch, logp)
        return Ahead(step=step, experience=experience, metrics=metrics, verdicts=verdicts)


def staleness(batch: Batch, logp: Sequence[Tensor], *, version: int) -> dict[str, float]:
    """How old the tokens are that take part in the loss, and how far the learner has moved since they were sampled.

    logp  FP32 [R] per sequence, of the learner of `version`
    """
    sequences = batch.sequences
    ages = torch.cat([(version - s.version_R.cpu())[s.mask_R.cpu()] for s in sequences])
    if not len(ages):
        return {}
    moved = compare(logp, [s.sampler_logp_R for s in sequences], [s.mask_R for s in sequences])
    return {
        "train/versions_behind": ages.double().mean().item(),
        "train/off_policy_kl": moved["mismatch/kl"],
        "train/off_policy_ess": moved["mismatch/ess"],
    }
