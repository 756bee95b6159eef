"""`onegrid bench`: speed on this machine, as a table and as JSON rows."""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from onegrid.cli.files import write_file
from onegrid.errors import ConfigError
from onegrid.ops.pins import pin
from onegrid.recipe import preset
from onegrid.sampler.engine import SamplerConfig
from onegrid.study import bench, bench_linears, bench_sampler
from onegrid.study.bench import Row
from onegrid.study.parts import find_device

PARTS = ("ops", "sampler", "learner", "sync", "linears", "host", "experts", "pins")
WIDE = 200
"""Columns of the table where no terminal says how many there are."""


def run(
    parts: tuple[str, ...],
    *,
    device: str,
    shape: str,
    presets: str,
    batches: str,
    prompt: int,
    new: int,
    tokens: int,
    layers: int | None,
    weights: str,
    output: Path | None,
) -> None:
    """Measures `parts` one after another and prints a table at the end.

    output  JSON file, which has a row as soon as it is known; rows of other commands that it holds already stay
    Raises ConfigError for an unknown part or shape, a device that is not there, sizes that cannot be, and a file that
    cannot be written or holds something else: before anything is measured.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"no part {part!r} to measure; parts: {', '.join(PARTS)}")
    if shape not in bench.SHAPES:
        raise ConfigError(f"no model shape {shape!r}; shapes: {', '.join(bench.SHAPES)}")
    device = find_device(device)
    names, counts = presets.split(","), batches.split(",")
    for one in names:
        preset(one)  # for its error
    asked = [*(("--batches", count, 1) for count in counts), ("--prompt", prompt, 1), ("--new", new, 1)]
    asked += [("--tokens", tokens, 4), ("--layers", 1 if layers is None else layers, 1)]
    for what, size, least in asked:
        if not str(size).isdecimal() or int(str(size)) < least:
            raise ConfigError(f"{what} is {size!r}; it must be a number of at least {least}")
    sizes = [int(count) for count in counts]
    arms = tuple(weights.split(","))
    for arm in arms:
        SamplerConfig(weights=arm)  # for its error
    earlier = [] if output is None else _earlier(output)
    pin(device)
    where = torch.device(device)
    cpu = f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else cpu
    about = {
        "command": "onegrid " + " ".join(sys.argv[1:]),
        "device": f"{name}, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    table = Table(title=about["device"], title_justify="left")
    columns = ("what", "ours", "unit", "other", "other is", "ratio", "target", "met", "weights, peak GiB")
    shown = columns if "sampler" in (parts or PARTS) else columns[:-1]
    for column in shown:
        table.add_column(column)
    rows: list[Row] = []
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    for part in parts or PARTS:
        if part == "ops":
            found = bench.bench_ops(where)
        elif part == "sampler":
            found = bench_sampler.bench_sampler(
                shape, names, sizes, where, prompt=prompt, new=new, layers=layers, weights=arms
            )
        elif part == "learner":
            found = bench.bench_learner(shape, names, where, tokens=tokens, layers=layers)
        elif part == "linears":
            found = bench_linears.bench_linears(shape, where, tokens=tokens)
        elif part == "host":
            found = bench_linears.bench_host(shape, names, where, layers=layers)
        elif part == "experts":
            found = bench_linears.bench_experts(where, layers=layers or 2, batches=sizes, new=new)
        elif part == "pins":
            found = bench_linears.bench_pins(shape, where, tokens=tokens)
        else:
            found = bench.bench_sync(shape, names, where, layers=layers)
        for row in found:
            rows.append(row)
            table.add_row(*_cells(row)[: len(shown)])
            if output is not None:
                _save(output, earlier, rows, about)
    console.print(table)


def _cells(row: Row) -> tuple[str, ...]:
    other = "" if row.other is None else f"{row.other:.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    met = "" if row.met is None else "yes" if row.met else "no"
    memory = ", ".join(f"{x / 2**30:.3g}" for x in (row.weight_bytes, row.peak_bytes) if x is not None)
    return row.name, f"{row.ours:.4g}", row.unit, other, row.what, ratio, row.target, met, memory


def _earlier(output: Path) -> list[dict[str, Any]]:
    """Rows that a file holds. ConfigError where it holds something else, or cannot be written."""
    try:
        old = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"--json {output} cannot be read as rows of earlier measurements: {error}") from error
    if not isinstance(old, list) or not all(isinstance(entry, dict) and "command" in entry for entry in old):
        raise ConfigError(f"--json {output} holds no list of measured rows; name a new file, or one of `onegrid bench`")
    write_file("--json", output, None)
    return old


def _save(output: Path, earlier: list[dict[str, Any]], rows: list[Row], about: dict[str, str]) -> None:
    kept = [entry for entry in earlier if entry["command"] != about["command"]]
    write_file("--json", output, json.dumps([*kept, *(asdict(r) | about for r in rows)], indent=1) + "\n")
