"""`onegrid bench`: speed on this machine, as a table and as JSON rows."""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from onegrid.errors import ConfigError
from onegrid.ops.pins import pin
from onegrid.recipe import preset
from onegrid.sampler.engine import SamplerConfig
from onegrid.study import bench, bench_linears, bench_sampler
from onegrid.study.bench import Row
from onegrid.study.parts import find_device

PARTS = ("ops", "sampler", "learner", "sync", "linears", "host", "experts")


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
    """Measures `parts` one after another and prints a row as soon as it is known.

    output  JSON file; rows of other commands that it holds already stay
    Raises ConfigError for an unknown part or shape, or a device that is not there.
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
    for what, size in (*(("--batches", count) for count in counts), ("--prompt", prompt), ("--new", new)):
        if not str(size).isdigit() or int(str(size)) < 1:
            raise ConfigError(f"{what} is {size!r}; it must be a number of at least 1")
    sizes = [int(count) for count in counts]
    arms = tuple(weights.split(","))
    for arm in arms:
        SamplerConfig(weights=arm)  # for its error
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
        else:
            found = bench.bench_sync(shape, names, where, layers=layers)
        for row in found:
            rows.append(row)
            table.add_row(*_cells(row)[: len(shown)])
            if output is not None:
                _save(output, rows, about)
    console.print(table, crop=False, soft_wrap=not console.is_terminal)


def _cells(row: Row) -> tuple[str, ...]:
    other = "" if row.other is None else f"{row.other:.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    met = "" if row.met is None else "yes" if row.met else "no"
    memory = ", ".join(f"{x / 2**30:.3g}" for x in (row.weight_bytes, row.peak_bytes) if x is not None)
    return row.name, f"{row.ours:.4g}", row.unit, other, row.what, ratio, row.target, met, memory


def _save(output: Path, rows: list[Row], about: dict[str, str]) -> None:
    old = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    kept = [entry for entry in old if entry["command"] != about["command"]]
    output.write_text(json.dumps([*kept, *(asdict(r) | about for r in rows)], indent=1) + "\n", encoding="utf-8")
