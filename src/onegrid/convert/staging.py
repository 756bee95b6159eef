"""The folder in which a conversion grows, and the rename that puts it in place."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onegrid.convert.prepare import RECORD, Work
from onegrid.convert.shard_files import ShardFile, Slot
from onegrid.convert.source import LEGACY
from onegrid.errors import CheckpointError, OnegridError, WeightsError
from onegrid.model.shards import INDEX, entries, inside, some

_JOB = "job.json"
_SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".spm")
"""Copied along: tokenizer, templates, generation settings. Never code, never pickles."""


def check_target(folder: Path, target: Path, *, overwrite: bool) -> None:
    """WeightsError unless the target may be written: apart from the source, empty or a checkpoint to be replaced."""
    end, source = target.resolve(), folder.resolve()
    if end == source:
        raise WeightsError(f"{target} is the source itself; convert into another folder")
    if source.is_relative_to(end):
        raise WeightsError(f"{target} holds the source {folder} and would replace it; convert into another folder")
    try:
        replaced = replaced_of(target)
        if replaced.exists() and not target.exists():  # killed between two renames
            os.replace(replaced, target)
        if (target.exists() or target.is_symlink()) and (target.is_symlink() or not target.is_dir()):
            kind = "link" if target.is_symlink() else "file"
            raise WeightsError(f"{target} is a {kind}; a checkpoint is a folder of its own")
        held = sorted(target.iterdir()) if target.exists() else []
    except OSError as error:
        raise CheckpointError(f"cannot look into {target}: {error}") from error
    if held and not overwrite:
        raise WeightsError(f"{target} is not empty; choose another folder, or overwrite it on purpose (--overwrite)")
    others = [path.name for path in held if path.is_dir() and path.name != ".cache"]
    if held and (others or not (target / "config.json").exists()):
        told = f"holds the folders {some(others)}" if others else "has no config.json"
        raise WeightsError(
            f"{target} {told}, so it is no checkpoint; only one is overwritten, remove the rest yourself"
        )


def staging_of(target: Path) -> Path:
    """The hidden folder beside a target in which it grows."""
    return target.parent / f".{target.name}.converting"


def replaced_of(target: Path) -> Path:
    """Where what was at a target is for the moment between two renames."""
    return target.parent / f".{target.name}.replaced"


@contextmanager
def working(staging: Path, identity: str) -> Iterator[None]:
    """The working folder, for this conversion alone: made, or taken over from the same conversion.

    Left as it is by a kill or a disk that refuses, so that the same can go on; removed after any other error of ours.
    CheckpointError while another process works in it.
    """
    try:
        staging.mkdir(parents=True, exist_ok=True)
        held = os.open(staging, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"cannot work in {staging}: {error}") from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
            if not os.path.samestat(os.fstat(held), os.stat(staging)):
                raise OSError("it has just been finished")
        except OSError as error:
            raise CheckpointError(f"another conversion works in {staging}: wait for it, or end it ({error})") from error
        try:
            if not (staging / _JOB).exists() or (staging / _JOB).read_text() != identity:
                for path in staging.iterdir():
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            (staging / _JOB).write_text(identity)
        except OSError as error:
            raise CheckpointError(f"cannot work in {staging}: {error}") from error
        try:
            yield
        except CheckpointError:
            raise
        except OnegridError:  # what it is about will not be another time
            shutil.rmtree(staging, ignore_errors=True)
            raise
    finally:
        os.close(held)


def side_files(folder: Path, made: set[str]) -> list[Path]:
    """Small files that come along, but for those that are written anew. WeightsError for a link out of the folder."""
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _SIDE_FILES]
    return [inside(folder, name) for name in names if name not in made and not name.endswith(".index.json")]


def whole_files(staging: Path, files: list[ShardFile]) -> list[str]:
    """Names of the files that an earlier attempt has finished; what else is in their places is removed."""
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
    replaced = replaced_of(target)
    try:
        for path in side_files(work.source.folder, {*work.texts, INDEX, RECORD, LEGACY}):
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
