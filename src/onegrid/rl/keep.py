"""Which steps leave a checkpoint: every so many, the last, the best, and one that a signal asks for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from onegrid.errors import ConfigError
from onegrid.rl import checkpoint
from onegrid.rl.checkpoint import CheckpointConfig
from onegrid.rl.record import Record, Value, read_metrics


class Keeper:
    """Writes the checkpoints of one run.

    done  the step of the checkpoint that the run goes on from; None for a run that begins
    """

    def __init__(self, record: Record, config: CheckpointConfig, *, done: int | None) -> None:
        self._record, self._config = record, config
        self._saved = done
        self._best: tuple[float, int] | None = None
        for line in read_metrics(record.folder):
            self._judge(int(line["step"]), line)
        if self._best is not None:
            checkpoint.link_best(record.folder, self._best[1])

    def check(self, metrics: Mapping[str, Value]) -> None:
        """Raises ConfigError where an evaluation does not have what the best is chosen by."""
        key = self._config.best_metric
        if key and key not in metrics:
            near = difflib.get_close_matches(key, metrics, n=3)
            raise ConfigError(
                f"checkpoint.best_metric is {key!r}, which the evaluation does not give; "
                f"it gives {', '.join(near or sorted(metrics)) or 'nothing: eval.num_problems is 0'}"
            )

    def due(self, step: int, metrics: Mapping[str, Value], *, last: bool) -> bool:
        """Whether this step leaves a checkpoint, given its line of metrics."""
        best = self._judge(step, metrics)
        return last or best or bool(self._config.every and step % self._config.every == 0)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step, once the lines of metrics so far are on the disk."""
        if self._saved == step:
            return
        self._record.sync()
        best = None if self._best is None else self._best[1]
        checkpoint.save(self._record.folder, step, state, keep=self._config.keep, best=best)
        self._saved = step

    def _judge(self, step: int, metrics: Mapping[str, Value]) -> bool:
        """Whether the step is better than all before; an equal one is not. The start, step 0, does not count."""
        value = metrics.get(self._config.best_metric)
        if step == 0 or not self._config.best_metric or not isinstance(value, int | float):
            return False
        signed = float(value) if self._config.best_mode == "max" else -float(value)
        if self._best is not None and signed <= self._best[0]:
            return False
        self._best = (signed, step)
        return True
