"""Whether a run that goes on is the one that was begun: configuration, first weights, problems, libraries.

A resumed run ends in the bytes of an uninterrupted one only if it is the same run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onegrid.config import RunConfig, changed_keys, load_config
from onegrid.errors import CheckpointError
from onegrid.formats.digest import digests
from onegrid.learner.learner import Learner
from onegrid.rl.tasks import Prompt, Task

MAY_CHANGE = ("loop.num_steps", "checkpoint.", "record.", "trackers.")
"""What a resumed run may do differently and still be the same run."""
MEMORY = (
    "learner.max_tokens",
    "learner.recompute",
    "sampler.max_slots",
    "sampler.max_len",
    "sampler.prefill_tokens",
    "sampler.prefix_tokens",
    "guard.bucket_bytes",
    "task.scoring.workers",
)
"""What may be lowered after memory ran out (rl/out_of_memory.py). No token depends on it; sums of gradients may get
another order, and with it other last bits."""
BEGAN_WITH = "began_with"
"""Key of versions.json for what `first_of` gives."""


def refuse_changes(folder: Path, config: RunConfig) -> list[str]:
    """The settings of memory that are others than those the run of `folder` was begun with.

    Raises CheckpointError, with the keys, for a change of anything that makes it another run.
    """
    changed = changed_keys(load_config(folder / "config.toml"), config)
    other = [key for key in changed if not key.startswith(MAY_CHANGE) and key not in MEMORY]
    if other:
        raise CheckpointError(
            f"{folder} was begun with another {', '.join(other)}; resume with the same configuration "
            f"({', '.join((*MAY_CHANGE, *MEMORY))} may change), or begin another run"
        )
    return [key for key in changed if key in MEMORY]


def first_of(learner: Learner, task: Task, drawn: Sequence[Prompt]) -> dict[str, str]:
    """What identifies the first weights of a run, before a checkpoint is loaded, and its problems.

    drawn  problems of the first step and of the evaluation
    """
    base = learner.adapters.base if learner.adapters else {}
    tensors = {key: base.get(key, master.detach()) for key, master in learner.masters.items()}
    sums = digests([(t, "values") for t in tensors.values()])
    problems = [(p.prompt_index, p.tokens, p.answer) for p in drawn]
    of_files = getattr(task, "digest", "")
    found = {"model.checkpoint": [*zip(tensors, sums, strict=True)], "the problems": [of_files, *problems]}
    return {name: hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest() for name, value in found.items()}


def refuse_another_start(folder: Path, made_with: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Holds what a run goes on with against the versions.json that it was begun with.

    Raises CheckpointError where weights or problems are others; says which libraries, device or threads are.
    """
    try:
        before = dict(json.loads((folder / "versions.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        say(f"{folder / 'versions.json'} cannot be read: weights and problems are not held against the start")
        return
    began, now = before.get(BEGAN_WITH, {}), made_with[BEGAN_WITH]
    other = [name for name in now if name in began and began[name] != now[name]]
    if other:
        raise CheckpointError(
            f"{' and '.join(other)} are not what {folder} was begun with, under the same names; put back what was "
            "there, or begin another run"
        )
    for name, value in made_with.items():
        if isinstance(value, str) and name in before and before[name] != value:
            say(f"{name} was {before[name]} when the run began and is {value} now: bits may differ from here on")
