"""Which trackers a run reports to, and what each is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from onegrid.errors import ConfigError

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. Its files are in the folder `wandb` of the run directory."""

    project: str = "onegrid"
    entity: str = ""
    """Team or user; empty takes the account's own."""
    mode: Literal["online", "offline"] = "online"
    """Offline runs go up later, by `wandb sync`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowConfig:
    """MLflow."""

    uri: str = ""
    """Tracking URI; empty is the file mlflow.db in the run directory."""
    experiment: str = "onegrid"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackioConfig:
    """Trackio; its folder is the library's own (variable TRACKIO_DIR)."""

    project: str = "onegrid"
    space: str = ""
    """Hugging Face space such as "user/space"; empty keeps everything on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersConfig:
    """Who gets the lines of metrics.jsonl besides the file itself."""

    use: tuple[str, ...] = ()
    """Any of "tensorboard" (folder tensorboard of the run directory), "wandb", "mlflow" and "trackio"; each has an
    extra of the same name."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)

    def __post_init__(self) -> None:
        unknown = [name for name in self.use if name not in NAMES]
        if unknown:
            raise ConfigError(f"trackers.use names {', '.join(unknown)}; the trackers are {', '.join(NAMES)}")
        if len(set(self.use)) < len(self.use):
            raise ConfigError(f"trackers.use is {list(self.use)}; name each tracker once")
