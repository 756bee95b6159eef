"""`onegrid diagnose`: why learner and sampler of a run differ, and what they are known to differ by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from onegrid.config import RunConfig, load_config
from onegrid.errors import CapabilityError, ConfigError
from onegrid.guard.replay import weights_of
from onegrid.guard.sentinel import save_expectation
from onegrid.rl import checkpoint as checkpoints
from onegrid.rl.loop import snapshot
from onegrid.rl.tasks import closing_task
from onegrid.sampler.engine import Engine
from onegrid.study.calibration import batches, measure
from onegrid.study.diagnose import diagnose
from onegrid.study.parts import build, design
from onegrid.sync import push


def run(
    checkpoint: Path,
    overrides: Sequence[str],
    *,
    config: Path | None,
    older: Path | None,
    calibrate: Path | None,
    steps: int,
) -> None:
    """See `onegrid diagnose --help`."""
    console = Console(highlight=False)
    folder = checkpoints.state_folder(checkpoint)
    run_config, base = _config(checkpoint, folder, config, overrides)
    plan = design(replace(run_config, loop=replace(run_config.loop, reference_every=0)), base)
    parts = build(plan)
    learner, sampler, device = parts.learner, parts.sampler, plan.config.device
    old = None
    if older is not None:
        old_folder = checkpoints.state_folder(older)
        if old_folder is None:
            raise ConfigError(f"{older} is no checkpoint of a run; --older takes a folder global_step_N")
        learner.load_state_dict(checkpoints.load(old_folder, device)["learner"])
        old = weights_of(learner, learner.canonical())
    if folder is not None:
        learner.load_state_dict(checkpoints.load(folder, device)["learner"])
    with closing_task(parts.task):
        drawn = batches(
            parts.task,
            sampler,
            samples=plan.config.loop.samples_per_prompt,
            seed=plan.config.seed,
            sampling=plan.config.sampling,
            first=learner.num_updates + 1,
        )
        if calibrate is not None:
            found = measure(learner, sampler, drawn, steps, model=Path(plan.config.model.checkpoint).name)
            save_expectation(found, calibrate)
            for key, mean in found.mean.items():
                console.print(f"{key} {mean:.4g} +- {found.deviation[key]:.2g}")
            console.print(f"{calibrate}: {steps} steps at fixed weights; name it as guard.calibration", soft_wrap=True)
            return
        if not isinstance(sampler, Engine):
            raise CapabilityError("a diagnosis replays the embedded engine; of others, only --calibrate is measured")
        push(snapshot(learner), sampler)
        for line in diagnose(learner, sampler, next(drawn), older=old).lines():
            console.print(line, soft_wrap=True, markup=False)


def _config(path: Path, folder: Path | None, config: Path | None, overrides: Sequence[str]) -> tuple[RunConfig, Path]:
    model = [] if folder else [f"model.checkpoint={path.resolve()}"]
    if config is not None:
        return load_config(config, [*model, *overrides]), config.parent
    if folder is None:
        raise ConfigError(f"{path} belongs to no run; name a configuration with the task (--config)")
    return load_config(folder.parent.parent / "config.toml", overrides), Path()
