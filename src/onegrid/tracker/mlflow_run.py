"""MLflow, by default in an SQLite file of the run directory (its plain-file store cannot hold our nested keys)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from onegrid.tracker.config import MlflowConfig
from onegrid.tracker.trackers import Opening, flat

MOST = 500
"""Metrics in one call, well below the limit of its servers; the same for parameters below."""


class MlflowRun:
    """One run of one experiment; keeps clear of the library's global state."""

    def __init__(self, config: MlflowConfig, opening: Opening) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=config.uri or f"sqlite:///{opening.folder.resolve()}/mlflow.db")
        if opening.resumed:
            self.run_id = opening.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(config.experiment)
        self.run_id = self._client.create_run(experiment, run_name=opening.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in flat(opening.settings).items()]
        for i in range(0, len(params), 100):
            self._client.log_batch(self.run_id, params=params[i : i + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All keys in one transaction."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        for i in range(0, len(metrics), MOST):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + MOST])

    def close(self) -> None:
        """Marks the run as finished; a resume opens it again."""
        self._client.set_terminated(self.run_id)


def open_run(config: MlflowConfig, opening: Opening) -> MlflowRun:
    """A new run, or the one with the same id."""
    return MlflowRun(config, opening)
