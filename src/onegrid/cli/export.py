"""`onegrid export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from onegrid.config import load_config
from onegrid.errors import ConfigError
from onegrid.learner.learner import Learner
from onegrid.model.weights import load_weights
from onegrid.rl import checkpoint as checkpoints
from onegrid.rl.export import export_weights
from onegrid.study.parts import design


def run(checkpoint: Path, target: Path) -> None:
    """See `onegrid export --help`."""
    folder = checkpoints.state_folder(checkpoint)
    if folder is None:
        raise ConfigError(f"{checkpoint} is a Hugging Face folder already")
    plan = design(load_config(folder.parent.parent / "config.toml", ["device=cpu"]), Path())
    source = Path(plan.config.model.checkpoint)
    learner = Learner(plan.spec, plan.plan, load_weights(source, plan.spec), plan.config.learner, loss=plan.config.loss)
    learner.load_state_dict(checkpoints.load(folder)["learner"])
    export_weights(learner.tensors(), source, target)
    print(f"{target}: version {learner.version} of {source.name}, in BF16")
