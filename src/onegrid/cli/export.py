"""`onegrid export`: a checkpoint of a run as a Hugging Face folder, or its adapter as a folder of PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onegrid.config import load_config
from onegrid.errors import ConfigError
from onegrid.learner.adapter_files import write_adapter
from onegrid.learner.learner import Learner
from onegrid.model.weights import load_weights
from onegrid.rl import checkpoint as checkpoints
from onegrid.rl.export import export_weights
from onegrid.study.parts import design


def run(checkpoint: Path, target: Path, *, adapter: bool) -> None:
    """See `onegrid export --help`."""
    folder = checkpoints.state_folder(checkpoint)
    if folder is None:
        raise ConfigError(f"{checkpoint} is a Hugging Face folder already")
    plan = design(load_config(folder.parent.parent / "config.toml", ["device=cpu"]), Path())
    source, settings = Path(plan.config.model.checkpoint), plan.config.learner
    if settings.lora:  # what the adapter began as is not needed any more
        settings = replace(settings, lora=replace(settings.lora, adapter=""))
    elif adapter:
        raise ConfigError(f"{checkpoint} was trained without learner.lora, so it has no adapter; leave --adapter out")
    learner = Learner(plan.spec, plan.plan, load_weights(source, plan.spec), settings, loss=plan.config.loss)
    learner.load_state_dict(checkpoints.load(folder)["learner"])
    if adapter and learner.adapters:
        write_adapter(learner.adapters, str(source), target)
        count = learner.adapters.num_modules()
        print(f"{target}: adapter of version {learner.version} for {source.name}, {count} modules")
        return
    export_weights(learner.tensors(), source, target)
    print(f"{target}: version {learner.version} of {source.name}, in BF16")
