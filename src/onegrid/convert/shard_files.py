"""Safetensors files written tensor by tensor: places are computed from shapes first, so that one tensor is in memory.

The bytes of a file depend on names, types, shapes and values alone, never on the order or the files they came from.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onegrid.errors import CheckpointError

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F64": torch.float64,
    "BOOL": torch.bool,
}
"""Element types of safetensors that a checkpoint may hold here."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a file before it is written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file to write: which weights, and where each of their tensors will stand."""

    name: str
    weights: tuple[str, ...]
    """Canonical names, in the order they are produced."""
    slots: dict[str, Slot]
    starts: dict[str, int]
    """Key -> first byte in the file."""
    header: bytes
    size: int


def plan_files(targets: Mapping[str, Mapping[str, Slot]], *, max_shard_bytes: int) -> list[ShardFile]:
    """How the weights spread over files: in the given order, a new file where the next weight does not fit.

    targets  canonical name -> key -> slot; the tensors of a weight stay in one file
    """
    groups: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, slots in targets.items():
        need = sum(slot.num_bytes for slot in slots.values())
        if need > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= need
    total = len(groups)
    names = (
        ["model.safetensors"] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    )
    return [_shard_file(name, group, targets) for name, group in zip(names, groups, strict=True)]


def _shard_file(name: str, weights: list[str], targets: Mapping[str, Mapping[str, Slot]]) -> ShardFile:
    slots = {key: slot for weight in weights for key, slot in targets[weight].items()}
    ordered = sorted(slots, key=lambda key: -DTYPES[slots[key].dtype].itemsize)  # stable: wide types first stay aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    starts = {}
    for key in ordered:
        starts[key] = at
        end = at + slots[key].num_bytes
        header[key] = {"dtype": slots[key].dtype, "shape": list(slots[key].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    head = len(text).to_bytes(8, "little") + text
    return ShardFile(name, tuple(weights), slots, {key: data + s for key, s in starts.items()}, head, data + at)


def write_file(
    file: ShardFile,
    folder: Path,
    produce: Callable[[str], Mapping[str, Tensor]],
    *,
    done: Callable[[str], None],
    threads: int = 1,
) -> None:
    """Write one file under a temporary name, make it durable and rename it.

    produce  canonical name -> its tensors by key, exactly those of the file's slots
    done     called with every canonical name that is written
    threads  weights that are produced at a time; this thread writes them in order, so bytes do not depend on it
    Raises CheckpointError when the disk refuses; the partial file is removed, whole files stay for a later attempt.
    """
    partial = folder / f"{file.name}.partial"
    try:
        with partial.open("wb") as out:
            out.write(file.header)
            for name, tensors in _produced(file.weights, produce, threads):
                for key, tensor in tensors.items():
                    slot = file.slots[key]
                    assert tensor.dtype == DTYPES[slot.dtype] and tuple(tensor.shape) == slot.shape, (key, slot)
                    out.seek(file.starts[key])
                    out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                done(name)
            out.truncate(file.size)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, folder / file.name)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {folder / file.name}: {error}; nothing was replaced, and what is whole will be used "
            f"when the same conversion runs again"
        ) from error


def _produced(
    names: Iterable[str], produce: Callable[[str], Mapping[str, Tensor]], threads: int
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Names with their tensors, in order; at most `threads` weights and one more are in the making or waiting."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[str, Future[Mapping[str, Tensor]]]] = deque()
        for name in names:
            waiting.append((name, pool.submit(produce, name)))
            if len(waiting) > threads:  # one is written while so many are in the making
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()


def index_of(files: Iterable[ShardFile]) -> dict[str, object]:
    """Content of `model.safetensors.index.json`."""
    files = list(files)
    weight_map = {key: file.name for file in files for key in file.slots}
    total = sum(slot.num_bytes for file in files for slot in file.slots.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
