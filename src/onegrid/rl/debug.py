"""One half of a run at a time: only the sampler, or only the learner on rollouts that a run has kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from onegrid.errors import ConfigError, StoppedError
from onegrid.guard.guard import Guard, guard_sync
from onegrid.learner.learner import Learner
from onegrid.rl.clock import Clock
from onegrid.rl.draw import Drawing
from onegrid.rl.one_policy import incidents
from onegrid.rl.progress import Display
from onegrid.rl.record import Record
from onegrid.rl.stop import Stop
from onegrid.rl.summary import rollout_metrics
from onegrid.rl.tasks import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Half a run, to find out which half is to blame. Miles and slime have both as --debug-..."""

    rollouts_only: bool = False
    """Sample and score every step with the weights of the start; learn nothing. `onegrid train --rollouts-only`."""
    train_only: str = ""
    """A run directory whose rollouts are learned from, step by step; nothing is sampled or evaluated. With the same
    configuration all training metrics are the same bytes. `onegrid train --train-only FOLDER`."""

    def __post_init__(self) -> None:
        if self.rollouts_only and self.train_only:
            raise ConfigError("rollouts_only and train_only exclude each other; give one of them")


def from_folder(config: DebugConfig, base: Path) -> DebugConfig:
    """With an absolute folder name: a relative one starts at `base`. ConfigError if it has no rollouts."""
    if not config.train_only:
        return config
    folder = (base / config.train_only).resolve()
    if not any(folder.glob("rollouts/step_*.parquet")) and not any(folder.glob("step_*.parquet")):
        raise ConfigError(f"train_only is {config.train_only!r}, but {folder} holds no rollouts/step_N.parquet")
    return replace(config, train_only=str(folder))


def sample_only(
    drawing: Drawing,
    learner: Learner,
    *,
    guard: Guard,
    num_steps: int,
    tokenizer: Tokenizer,
    record: Record,
    display: Display,
    stop: Stop | None = None,
) -> None:
    """Rollouts of every step, all of the learner's present version, and what they were like, in `record`."""
    with incidents(record, learner, 0, clock := Clock()), clock("sync"):
        guard_sync(learner, drawing.sampler, guard)
    record.metrics(0, {})
    for step in range(1, num_steps + 1):
        if stop is not None and stop.signal:
            raise StoppedError(f"{stop.signal}: the rollouts of {step - 1} steps are written")
        with incidents(record, learner, step, clock := Clock()), clock("rollout"):
            drawn = drawing.groups(step, clock)
        record.rollouts(step, drawn.generated, tokenizer.decode, learned=drawn.groups)
        num_tokens = sum(r.tokens_R.numel() for group in drawn.generated for r in group.rollouts)
        metrics = rollout_metrics(drawn.generated) | clock.metrics(num_tokens=num_tokens)
        record.metrics(step, metrics)
        display.step(step, metrics)
