"""The run directory: everything that a run leaves behind, in files that any tool reads.

config.toml       the resolved configuration
plan.json         what the recipe made of every tensor
versions.json     libraries and device
metrics.jsonl     one flat object a step, keys sorted, floats exact; keys under perf/ are clock readings
incidents.jsonl   one object for every check that did not pass
rollouts/         one parquet file a step
checkpoints/      see checkpoint.py
lock              held by the process that writes here
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import onegrid
from onegrid.errors import CheckpointError, ConfigError, NonFiniteError
from onegrid.rl.stored_rollouts import file_name, table_of
from onegrid.types import Group

Value = float | int | str | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordConfig:
    """What the run directory keeps."""

    rollouts_every: int = 1
    """Steps between two that keep their rollouts; 0: none."""

    def __post_init__(self) -> None:
        if self.rollouts_every < 0:
            raise ConfigError(f"rollouts_every is {self.rollouts_every}; it must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A check that did not pass."""

    step: int
    version: int
    check: str
    """Such as "digest", "mismatch" or "health"."""
    condition: str
    """The condition of the contract that is broken, "C1" .. "C7", or empty."""
    tensors: tuple[str, ...]
    expected: str
    found: str
    likely_cause: str
    action: str


class Record:
    """Writer of one run directory. Every line is on its way to the disk when the call returns.

    folder  made if it does not exist; one that already holds metrics is refused unless `resume_step` is given
    resume_step  the step of the checkpoint that the run goes on from: later lines and rollouts are cut off, and so is a
        last line that a kill has torn. -1 begins anew.
    Raises CheckpointError for a folder that is in use by another run or cannot be written.
    """

    def __init__(self, folder: Path, *, config: RecordConfig | None = None, resume_step: int | None = None) -> None:
        self.folder = folder
        self.config = config or RecordConfig()
        self.listener: Callable[[int, Mapping[str, Value]], None] | None = None
        """Is told every line of metrics.jsonl once it is written, as trackers are."""
        if resume_step is None and (folder / "metrics.jsonl").exists():
            raise CheckpointError(f"{folder} already holds a run; go on with --resume, or name another --run-dir")
        if resume_step is None and any((folder / "checkpoints").glob("global_step_*")):
            raise CheckpointError(
                f"{folder} holds checkpoints of another run; move them away, or name another --run-dir"
            )
        with writing(folder):
            (folder / "rollouts").mkdir(parents=True, exist_ok=True)
            weakref.finalize(self, os.close, _lock(folder))
            for name in ("metrics.jsonl", "incidents.jsonl"):
                (folder / name).touch()
            if resume_step is not None:
                cut_lines(folder / "metrics.jsonl", resume_step)
                cut_lines(folder / "incidents.jsonl", resume_step)
                for path in (folder / "rollouts").glob("step_*.parquet"):
                    step = path.stem.removeprefix("step_")
                    if step.isdigit() and int(step) > resume_step:
                        path.unlink()

    def text(self, name: str, text: str) -> None:
        """Write a whole file of the run directory, such as config.toml, replacing it in one step."""
        temporary = self.folder / f".{name}.partial"
        with writing(self.folder / name):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.folder / name)

    def metrics(self, step: int, values: Mapping[str, Value]) -> None:
        """Append the line of one step. Raises NonFiniteError, with the keys, for NaN or Inf: none is ever written."""
        bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            shown = ", ".join(f"{key} = {values[key]}" for key in sorted(bad))
            raise NonFiniteError(f"step {step}: {shown}; metrics must be finite, or absent where they are undefined")
        self._append("metrics.jsonl", {"step": step, **values})
        if self.listener is not None:
            self.listener(step, values)

    def incident(self, incident: Incident) -> None:
        """Append one object with the fields of `Incident`."""
        fields = {name: getattr(incident, name) for name in Incident.__slots__}
        self._append("incidents.jsonl", fields | {"tensors": list(incident.tensors)})

    def rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        text_of: Callable[[Sequence[int]], str],
        *,
        learned: Sequence[Group] | None = None,
    ) -> None:
        """Write every rollout of a step as one parquet file, if the configuration keeps this step.

        text_of  turns the tokens of a prompt into text
        learned  the groups that the step learns from; None: all
        Columns: see `stored_rollouts.table_of`.
        """
        if not self.config.rollouts_every or step % self.config.rollouts_every:
            return
        import pyarrow.parquet as pq

        path = self.folder / "rollouts" / file_name(step)
        temporary = path.with_name(f".{path.name}.partial")
        with writing(path):
            pq.write_table(table_of(step, groups, text_of, learned=learned), temporary, compression="zstd")
            os.replace(temporary, path)

    def sync(self) -> None:
        """Bring the lines written so far to the disk, so that a checkpoint never knows more than they do."""
        for name in ("metrics.jsonl", "incidents.jsonl"):
            with writing(self.folder / name), open(self.folder / name, "ab") as file:
                os.fsync(file.fileno())

    def _append(self, name: str, fields: Mapping[str, Any]) -> None:
        line = json.dumps(fields, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self.folder / name), open(self.folder / name, "ab") as file:
            file.write(line.encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk says while `path` is written into a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error}; what was there stays, and --resume goes on once this is mended"
        ) from error


def _lock(folder: Path) -> int:
    """An open file that no other process can have locked too; the system lets go of it however this one ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(descriptor, 20).decode().strip()
        os.close(descriptor)
        raise CheckpointError(
            f"{folder} is in use by another run (process {holder}); wait for it, stop it, or name another --run-dir"
        ) from error
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def cut_lines(path: Path, last_step: int) -> None:
    """Keep the whole lines of a jsonl file up to `last_step`, and drop what comes after, a torn last line included.

    Raises CheckpointError for a line in the middle that is not an object with a step: then the file is not ours to cut.
    """
    kept = 0
    lines = path.read_bytes().split(b"\n")
    for i, line in enumerate(lines[:-1]):  # what follows the last newline is empty or torn
        try:
            beyond = json.loads(line)["step"] > last_step
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}, line {i + 1} is not a line of a run: {line[:80]!r}") from error
        if beyond:
            break
        kept += len(line) + 1
    os.truncate(path, kept)


def read_metrics(folder: Path) -> list[dict[str, Value]]:
    """The lines of metrics.jsonl, without a torn last one. Raises CheckpointError for one that is not an object."""
    path = folder / "metrics.jsonl"
    found = []
    for i, line in enumerate(path.read_bytes().split(b"\n")[:-1]):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path}, line {i + 1} is not a line of a run: {line[:80]!r}") from error
    return found


def num_lines(path: Path) -> int:
    """Whole lines of a file; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_whole(folder: Path, num_steps: int) -> None:
    """Raises CheckpointError unless metrics.jsonl has one line for the start and one for each step, in order."""
    steps = [line.get("step") for line in read_metrics(folder)]
    if steps != list(range(num_steps + 1)):
        raise CheckpointError(
            f"{folder / 'metrics.jsonl'} holds {len(steps)} lines for {num_steps} steps and the start; "
            "put back what was taken out, or begin another run"
        )


def versions() -> dict[str, str]:
    """What the bits of a run can depend on: libraries, interpreter, device kind, instruction set, threads."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "onegrid": onegrid.__version__}
    for name in ("torch", "numpy", "safetensors", "pyarrow", "tokenizers", "reasoning-gym", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["cpu"] = torch.backends.cpu.get_cpu_capability()
    found["threads"] = str(torch.get_num_threads())
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found["cuda"] = str(torch.version.cuda or "none")
    return found


def free_run_folder(parent: Path, stem: str) -> Path:
    """`parent/stem-N` with the lowest N from 1 that is not there yet."""
    n = 1
    while (parent / f"{stem}-{n}").exists():
        n += 1
    return parent / f"{stem}-{n}"


def last_run_folder(parent: Path, stem: str) -> Path | None:
    """`parent/stem-N` with the highest N, if there is one."""
    numbers = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*") if (p / "metrics.jsonl").exists()]
    found = [int(n) for n in numbers if n.isdigit()]
    return parent / f"{stem}-{max(found)}" if found else None
