"""Safetensors files of one checkpoint folder: what their headers say, and writing them so that no crash harms the last.

Every file is written under a temporary name and renamed at the end; the rename of the index, or of the single file, is
what makes a new checkpoint count.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onegrid.errors import CheckpointError, WeightsError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor of a checkpoint lies, from the file's header alone."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the checkpoint, from the headers of its files. A single file wins over an index.

    WeightsError for files that are missing, damaged or outside the folder, and for an index that disagrees with them.
    """
    if (folder / SINGLE).exists():
        return _header(inside(folder, SINGLE))
    if not (folder / INDEX).exists():
        raise WeightsError(f"no weights in {folder}: neither {SINGLE} nor {INDEX}")
    listed = read_object(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise WeightsError(f"{folder / INDEX} is not an index: its weight_map must name a file for every tensor")
    paths = {file: inside(folder, file) for file in dict.fromkeys(listed.values())}
    found: dict[str, Entry] = {}
    for file, path in paths.items():
        for name, entry in _header(path).items():
            if listed.get(name) != file:
                raise WeightsError(f"extra tensor {name} in {file}: the index has it in {listed.get(name, 'no file')}")
            found[name] = entry
    missing = [name for name in listed if name not in found]
    if missing:
        raise WeightsError(f"{some(missing)} missing from {listed[missing[0]]}, though {INDEX} lists it there")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. WeightsError for one that cannot be read or has a key twice."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_once, path))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing; a checkpoint folder has a {path.name}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds a {type(value).__name__}; it must be an object")
    return value


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise WeightsError(f"{path} lists {some([key for key, count in counts.items() if count > 1])} twice")
    return found


def inside(folder: Path, name: str) -> Path:
    """Path of a file of a checkpoint. WeightsError where the name, or a link in its place, leads out of the folder.

    The cache of the Hugging Face hub is known: its snapshots are links to the blobs beside them.
    """
    if Path(name).name != name or name in (".", "..") or "\\" in name or "\0" in name:
        raise WeightsError(f"{folder / INDEX} names the file {name!r}; only files in the folder itself are read")
    path, home = folder / name, folder.resolve()
    if path.is_symlink():
        end = path.resolve()
        blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
        if not end.is_relative_to(home) and end.parent not in blobs:
            raise WeightsError(f"{path} is a link to {end}, outside the checkpoint; put the file itself there")
    return path


def _header(path: Path) -> dict[str, Entry]:
    with open_shard(path) as file:
        with path.open("rb") as raw:  # of a name that is there twice, safetensors would keep one
            json.loads(raw.read(int.from_bytes(raw.read(8), "little")), object_pairs_hook=partial(_once, path))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return {name: Entry(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def open_shard(path: Path):
    """An open safetensors file, whose length has been compared with its header."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is truncated or damaged: {error}") from error


def write_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path, *, max_shard_bytes: int
) -> None:
    """Write tensors and config.json; shards and an index where they exceed max_shard_bytes (a tensor alone may).

    Raises CheckpointError when the disk refuses; the checkpoint that was there stays, and no partial file does.
    """
    temporary: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        moves = _write(folder, _shards(tensors, max_shard_bytes), config, temporary)
        for path, final in moves:
            os.replace(path, final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        for path in temporary:
            path.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write weights to {folder}: {error}; the last good ones are still there"
        ) from error
    _remove_stale(folder, {final.name for _, final in moves})


def some(names: list[str], count: int = 4) -> str:
    """The first few names for a message, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write(
    folder: Path, shards: list[dict[str, Tensor]], config: Mapping[str, Any], temporary: list[Path]
) -> list[tuple[Path, Path]]:
    """Writes everything under temporary names, noted in `temporary` first; returns the renames, the deciding one last.

    Shards get names that no file has yet: what the old index points to is never overwritten.
    """
    total, save = len(shards), 0
    while any((folder / _shard_name(save, i, total)).exists() for i in range(total)):
        save += 1
    names = [SINGLE] if total == 1 else [_shard_name(save, i, total) for i in range(total)]
    moves = []

    def reserve(name: str) -> Path:
        path = folder / f".{name}.{os.getpid()}.partial"
        temporary.append(path)
        moves.append((path, folder / name))
        return path

    path = reserve("config.json")
    path.write_text(json.dumps(dict(config), indent=2) + "\n")
    _sync(path)
    for name, shard in zip(names, shards, strict=True):
        path = reserve(name)
        save_file({n: _alone(t) for n, t in shard.items()}, path, metadata={"format": "pt"})
        _sync(path)
    if total > 1:
        weight_map = {n: name for name, shard in zip(names, shards, strict=True) for n in shard}
        size = sum(t.nbytes for shard in shards for t in shard.values())
        path = reserve(INDEX)
        path.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
        _sync(path)
    return moves


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU with storage of its own: views of packed experts may not be written as they are."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _shard_name(save: int, i: int, total: int) -> str:
    return f"model{f'-{save}' if save else ''}-{i + 1:05d}-of-{total:05d}.safetensors"


def _sync(path: Path) -> None:
    """Makes a file, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(folder: Path, written: Iterable[str]) -> None:
    """Weights of the replaced checkpoint. Where that was a single file, its removal makes the new shards count."""
    for path in [folder / SINGLE, folder / INDEX, *folder.glob("model-*.safetensors")]:
        if path.name not in written:
            path.unlink(missing_ok=True)
