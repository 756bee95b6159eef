"""TensorBoard: event files in the folder `tensorboard` of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping

from onegrid.tracker.trackers import Opening


class TensorboardRun:
    """Scalars in double precision, on the disk after every step."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(opening.folder / "tensorboard"))
        if not opening.resumed:
            text = json.dumps(opening.settings, indent=1, default=str)
            self._writer.add_text("config", f"```json\n{text}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a key."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        self._writer.close()


def open_run(config: None, opening: Opening) -> TensorboardRun:
    """Nothing is configurable."""
    return TensorboardRun(opening)
