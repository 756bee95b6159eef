"""Trackio, on this machine or in a Hugging Face space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onegrid.tracker.config import TrackioConfig
from onegrid.tracker.trackers import Opening, flat


class TrackioRun:
    """One run, found again by its name."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All keys at once."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until everything is written."""
        self._run.finish()


def open_run(config: TrackioConfig, opening: Opening) -> TrackioRun:
    """A new run, or the one with the same name. The name carries our id: many run directories are called run-1."""
    import trackio

    run = trackio.init(
        project=config.project,
        name=f"{opening.name}-{opening.run_id}",
        space_id=config.space or None,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
        config={key: str(value) for key, value in flat(opening.settings).items()},
    )
    return TrackioRun(run)
