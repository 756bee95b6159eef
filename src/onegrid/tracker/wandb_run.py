"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onegrid.tracker.config import WandbConfig
from onegrid.tracker.trackers import Opening


class WandbRun:
    """One run whose axis is the step of the record, so that a resumed one goes on where it was."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All keys at once."""
        self._run.log({"step": step, **values}, step=step)

    def close(self) -> None:
        """Waits until everything is sent, or on the disk when offline."""
        self._run.finish()


def open_run(config: WandbConfig, opening: Opening) -> WandbRun:
    """A new run, or the one with the same id."""
    import wandb

    run = wandb.init(
        project=config.project,
        entity=config.entity or None,
        mode=config.mode,
        id=opening.run_id,
        name=opening.name,
        resume="allow",
        dir=str(opening.folder),
        config=dict(opening.settings),
        allow_val_change=True,
        settings=wandb.Settings(console="off", silent=True),
    )
    return WandbRun(run)
