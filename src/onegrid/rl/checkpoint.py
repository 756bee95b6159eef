"""Checkpoints of a run: `checkpoints/global_step_N/`, there whole or not at all.

A checkpoint is written under a temporary name, brought to the disk, and renamed. So a kill, a full disk or a power cut
at any moment leaves the last good one as it was.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from onegrid.errors import CheckpointError, ConfigError

PREFIX = "global_step_"
NAME = re.compile(rf"{PREFIX}(0|[1-9][0-9]*)")
PARTIAL = ".partial_"
BEST = "best"
KEYS = {"learner", "step", "constant_steps"}
"""What every checkpoint of a run holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run directory gets a checkpoint. The last step always does."""

    every: int = 20
    """Steps; 0: only at the end."""
    keep: int = 2
    """How many of the last ones stay."""
    best_metric: str = ""
    """Key of an evaluation, such as "eval/held_out/accuracy": the step with the best value after the start gets a
    checkpoint that stays, and `checkpoints/best` points to it. Empty: none. eval.every says how often it is asked."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better; of equal ones the first is kept."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ConfigError(f"every {self.every} must be at least 0 and keep {self.keep} at least 1")
        if self.best_metric and not self.best_metric.startswith("eval/"):
            raise ConfigError(f"best_metric is {self.best_metric!r}; it must be one of eval/...")


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int, best: int | None = None) -> Path:
    """Write `state` (nested dictionaries, lists, tensors, numbers, text) as the checkpoint of `step`.

    folder  the run directory
    keep    how many of the last checkpoints stay, this one included
    best    the step whose checkpoint stays beside them, and that `checkpoints/best` points to
    Raises CheckpointError, naming the last good checkpoint, if it cannot be written; nothing is lost then.
    """
    checkpoints = folder / "checkpoints"
    final = checkpoints / f"{PREFIX}{step}"
    partial = checkpoints / f"{PARTIAL}{step}"
    try:
        for left in checkpoints.glob(f"{PARTIAL}*"):  # of a save that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True, exist_ok=True)
        with _create(partial / "state.pt") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        before = checkpoints / f"{PARTIAL}before"
        if final.exists():  # a run that was resumed from an earlier one comes by again
            os.rename(final, before)
        os.rename(partial, final)
        _sync_folder(checkpoints)
        shutil.rmtree(before, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        shutil.rmtree(partial, ignore_errors=True)
        good = latest(folder)
        kept = f"the last good one is {good}" if good else "there is no earlier one"
        raise CheckpointError(f"cannot write the checkpoint of step {step} to {final}: {cause}; {kept}") from error
    if best is not None:
        link_best(folder, best)
    for old in [number for number in steps(folder) if number <= step][:-keep]:
        if old != best:
            shutil.rmtree(checkpoints / f"{PREFIX}{old}", ignore_errors=True)  # what stays has its turn again
    return final


def link_best(folder: Path, step: int) -> None:
    """Make `checkpoints/best` point to the checkpoint of a step, if that is there.

    Raises CheckpointError where that name is taken by something else.
    """
    target = folder / "checkpoints" / f"{PREFIX}{step}"
    if not target.is_dir():
        return
    temporary, link = target.with_name(f"{PARTIAL}best"), target.with_name(BEST)
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot make {link} a link to {target.name}: {error}; move what is there away"
        ) from error


@contextmanager
def contents() -> Iterator[None]:
    """Turns what goes wrong while a state is taken apart into a CheckpointError: it is whole, and not that of a run."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not hold the state of such a run ({type(error).__name__}: {error}); "
            "resume from another one, or begin another run"
        ) from error


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint folder. Raises CheckpointError if it is missing, damaged or not the checkpoint of its step.

    torch.load looks at no check sum, so that one flipped bit would be trained on; the sums are compared here.
    """
    try:
        with zipfile.ZipFile(path / "state.pt") as file:
            damaged = file.testzip()
        if damaged is not None:
            raise _unreadable(path, f"state.pt is damaged: the check sum of {damaged} is wrong")
        state = torch.load(path / "state.pt", map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    except Exception as error:  # pickle, zip and torch each have their own errors for a bad file, and all mean the same
        raise _unreadable(path, f"state.pt is damaged ({type(error).__name__})") from error
    if not isinstance(state, dict) or KEYS - state.keys():
        raise _unreadable(path, f"state.pt is not the state of a run: it lacks some of {', '.join(sorted(KEYS))}")
    wrong = [name for name in ("step", "constant_steps") if type(state[name]) is not int or state[name] < 0]
    if wrong or not isinstance(state["learner"], dict):
        raise _unreadable(path, f"state.pt is not the state of a run: {', '.join(wrong) or 'learner'} is of no use")
    number = path.name.removeprefix(PREFIX)
    if number.isdigit() and state.get("step") != int(number):
        raise _unreadable(path, f"state.pt is that of step {state.get('step')!r}")
    return state


def _unreadable(path: Path, why: str) -> CheckpointError:
    names = [f"{PREFIX}{n}" for n in steps(path.parent.parent) if f"{PREFIX}{n}" != path.name]
    kept = f"without this folder a run goes on from {names[-1]}" if names else "there is no other checkpoint here"
    return CheckpointError(f"cannot read the checkpoint {path}: {why}; {kept}")


def steps(folder: Path) -> list[int]:
    """Steps that have a whole checkpoint, ascending. Files, and folders of other names, are somebody else's."""
    found = [(NAME.fullmatch(p.name), p) for p in (folder / "checkpoints").glob(f"{PREFIX}*")]
    return sorted(int(name[1]) for name, p in found if name and p.is_dir())


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint of a run directory."""
    found = steps(folder)
    return folder / "checkpoints" / f"{PREFIX}{found[-1]}" if found else None


def state_folder(path: Path) -> Path | None:
    """The checkpoint that a path means: a folder `global_step_N`, the last of a run, None for a Hugging Face folder.

    Raises CheckpointError for anything else.
    """
    if (path / "state.pt").exists():
        return path
    if (path / "metrics.jsonl").exists():
        last = latest(path)
        if last is None:
            raise CheckpointError(f"{path} is a run without a checkpoint")
        return last
    if (path / "config.json").exists():
        return None
    raise CheckpointError(f"{path} is no checkpoint: neither a run, a step of one, nor a folder with config.json")


def _create(path: Path) -> Any:
    return open(path, "xb")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
