"""The folder in which a conversion grows, and the rename that puts it in place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from onegrid.convert.prepare import RECORD, Work
from onegrid.convert.shard_files import ShardFile, Slot
from onegrid.errors import CheckpointError, WeightsError
from onegrid.model.shards import INDEX, entries, some

_JOB = "job.json"
_SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".spm")
"""Copied along: tokenizer, templates, generation settings. Never code, never pickles."""


def check_target(folder: Path, target: Path, *, overwrite: bool) -> None:
    """WeightsError unless the target may be written: another folder than the source, empty or meant to be replaced."""
    if target.exists() and folder.exists() and target.resolve() == folder.resolve():
        raise WeightsError(f"{target} is the source itself; convert into another folder")
    replaced = target.parent / f".{target.name}.replaced"
    if replaced.exists() and not target.exists():  # killed between two renames
        os.replace(replaced, target)
    if target.exists() and not target.is_dir():
        raise WeightsError(f"{target} is a file; a checkpoint is a folder")
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise WeightsError(f"{target} is not empty; choose another folder, or overwrite it on purpose (--overwrite)")


def start(staging: Path, identity: str, files: list[ShardFile]) -> list[str]:
    """Make the working folder, or take over that of the same conversion; returns the files that are whole."""
    try:
        if staging.exists() and (not (staging / _JOB).exists() or (staging / _JOB).read_text() != identity):
            shutil.rmtree(staging)
        staging.mkdir(parents=True, exist_ok=True)
        (staging / _JOB).write_text(identity)
    except OSError as error:
        raise CheckpointError(f"cannot work in {staging}: {error}") from error
    whole = []
    for file in files:
        path = staging / file.name
        if path.exists() and path.stat().st_size == file.size:
            whole.append(file.name)
        else:
            path.unlink(missing_ok=True)
    return whole


def finish(staging: Path, target: Path, work: Work) -> None:
    """Small files, a last look at what was written, and the rename that makes it count."""
    replaced = target.parent / f".{target.name}.replaced"
    made = {*work.texts, INDEX, RECORD, "hf_quant_config.json"}
    try:
        for path in sorted(work.source.folder.iterdir()):
            if path.is_file() and path.suffix in _SIDE_FILES and path.name not in made:
                shutil.copyfile(path, staging / path.name)
        for name, text in work.texts.items():
            (staging / name).write_text(text)
        _check_written(staging, work.files)
        (staging / _JOB).unlink()
        for path in staging.iterdir():
            _sync(path)
        _sync(staging)
        if target.exists() and any(target.iterdir()):
            os.replace(target, replaced)
        elif target.exists():
            target.rmdir()
        os.replace(staging, target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot finish {target}: {error}; what was there stays, and the same conversion goes on when run again"
        ) from error
    shutil.rmtree(replaced, ignore_errors=True)


def _check_written(staging: Path, files: list[ShardFile]) -> None:
    wanted = {key: slot for file in files for key, slot in file.slots.items()}
    found = {key: Slot(entry.dtype, entry.shape) for key, entry in entries(staging).items()}
    if found != wanted:
        wrong = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
        raise WeightsError(f"{some(wrong)} did not come out as planned")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
