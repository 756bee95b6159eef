"""A run directory as it is: whole, still growing, cut short or damaged. What cannot be read is said, not guessed."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from onegrid.errors import CheckpointError

MOST = 2**53
"""Of integers: what a double, and so a chart, holds exactly."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything readable of one run directory. Empty where a file is missing, with a line in `missing`."""

    name: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    trackers: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics.jsonl, by step, each step once (the later line wins)."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Sentences about what is not there or cannot be read."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of training steps, without that of the start."""
        return [line for line in self.lines if line["step"] > 0]

    @property
    def last_step(self) -> int:
        """0 before the first step is done."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def num_steps(self) -> int | None:
        """Steps that the configuration asks for; None where it cannot be read."""
        found = self.table("loop").get("num_steps")
        return found if isinstance(found, int) else None

    def table(self, name: str) -> dict[str, Any]:
        """A section of the configuration, empty where there is none."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was measured. What is no finite number counts as not measured."""
        pairs = [(line["step"], line[key]) for line in self.lines if is_number(line.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def keys(self, prefix: str) -> list[str]:
        """Metrics that begin with `prefix` and have at least one number, sorted."""
        return sorted({k for line in self.lines for k, v in line.items() if k.startswith(prefix) and is_number(v)})


def is_number(value: object) -> TypeGuard[float]:
    """A finite float, or an int of at most 2^53; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MOST if isinstance(value, int) else math.isfinite(value)


def _is_step(value: object) -> bool:
    return is_number(value) and isinstance(value, int)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run, with names that tell them apart. Raises CheckpointError for a folder that is no run directory."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    """One run. Raises CheckpointError if there is neither config.toml nor metrics.jsonl."""
    if not any((folder / file).exists() for file in ("config.toml", "metrics.jsonl")):
        raise CheckpointError(
            f"{folder} has neither config.toml nor metrics.jsonl; a run directory is what `onegrid train` leaves, "
            "such as runs/quickstart-1"
        )
    missing: list[str] = []
    text = _text(folder / "config.toml", missing, "the configuration is not shown")
    config: dict[str, Any] = {}
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        missing.append(f"config.toml is not TOML ({error}); it is shown as it is, and nothing is taken from it.")
    incidents = _lines(folder / "incidents.jsonl", missing, "whether there were incidents is not known")
    for incident in incidents:
        tensors = incident.get("tensors") or []
        incident["tensors"] = list(map(str, tensors if isinstance(tensors, list) else [tensors]))
        if not _is_step(incident.get("step")):
            incident["step"] = None
    metrics = _lines(folder / "metrics.jsonl", missing, "nothing was measured yet")
    by_step = {line["step"]: line for line in metrics if _is_step(line.get("step"))}
    if len(metrics) > sum(_is_step(line.get("step")) for line in metrics):
        missing.append("Lines of metrics.jsonl without a step are left out.")
    if metrics and not any(step > 0 for step in by_step):
        missing.append("No training step is done yet.")
    return Run(
        name=name or folder.resolve().name,
        folder=folder,
        config=config,
        config_text=text,
        plan=_object(folder / "plan.json", missing, "the plan is not shown"),
        versions=_object(folder / "versions.json", missing, "device and libraries are not known"),
        trackers=_object(folder / "trackers.json", [], ""),
        lines=[by_step[step] for step in sorted(by_step)],
        incidents=incidents,
        missing=missing,
    )


def _text(path: Path, missing: list[str], so: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        missing.append(f"{path.name} cannot be read ({error.strerror or error}): {so}.")
        return ""


def _object(path: Path, missing: list[str], so: str) -> dict[str, Any]:
    before = len(missing)
    text = _text(path, missing, so)
    if len(missing) > before:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        missing.append(f"{path.name} is not JSON ({error}): {so}.")
        return {}
    if not isinstance(found, dict):
        missing.append(f"{path.name} holds no object: {so}.")
        return {}
    return found


def _lines(path: Path, missing: list[str], so: str) -> list[dict[str, Any]]:
    """The objects of a jsonl file. A last line without its newline is torn, or is being written right now."""
    before = len(missing)
    text = _text(path, missing, so)
    if len(missing) > before:
        return []
    found, bad = [], []
    *whole, torn = text.split("\n")
    for i, line in enumerate(whole):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            bad.append(i + 1)
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (" ..." if len(bad) > 5 else "")
        missing.append(f"{path.name}: {len(bad)} lines are no objects and are left out (line {shown}).")
    if torn:
        missing.append(f"{path.name}: the last line is torn and left out; a run in progress or a kill leaves that.")
    return found
