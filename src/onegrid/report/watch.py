"""`onegrid watch`: the page of a run in a terminal, drawn again while the run grows."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from onegrid.report.facts import NOT_MEASURED, facts, identity, number
from onegrid.report.lights import rows
from onegrid.report.reading import Run, read_run

BARS = "▁▂▃▄▅▆▇█"
CURVES = {
    "rollout/raw_reward": "reward",
    "rollout/response_length": "length",
    "rollout/truncated_share": "cut at the cap",
    "train/entropy": "entropy",
    "mismatch/max_abs": "mismatch",
    "train/grad_norm": "gradient norm",
    "perf/step_seconds": "s a step",
}
COLORS = {"good": "green", "bad": "bold red", "unsure": "yellow", "": "bold"}
LIGHTS = {
    "passed": ("■", "green"),
    "failed": ("✗", "bold red"),
    "could not tell": ("?", "yellow"),
    "absent": ("·", "dim"),
}


def watch(folder: Path, *, once: bool, every: float, console: Console | None = None) -> None:
    """Draw the run now, and, unless `once`, again every so many seconds until its last step or an interruption.

    Raises CheckpointError for a folder that is no run directory.
    """
    console = console or Console(highlight=False)
    run = read_run(folder)
    if once or not console.is_terminal:
        console.print(view(run, console.width))
        return
    with Live(view(run, console.width), console=console, refresh_per_second=4, screen=True) as live:
        while not _finished(run):
            time.sleep(every)
            run = read_run(folder)
            live.update(view(run, console.width))
    console.print(view(run, console.width))


def _finished(run: Run) -> bool:
    return run.num_steps is not None and run.last_step >= run.num_steps


def view(run: Run, width: int = 100) -> RenderableType:
    """Everything about a run in `width` columns, from 40 up."""
    title = Text.assemble((run.name, "bold"), "  ", *(f"{fact.label} {fact.value}  " for fact in identity(run)))
    parts: list[RenderableType] = [title, _headline(run), _curves(run, width), _checks(run, width)]
    parts += [_incident(incident) for incident in run.incidents[-3:]]
    if run.missing:
        parts.append(Text("\n".join(f"missing: {sentence}" for sentence in run.missing), style="yellow"))
    return Group(*parts)


def _headline(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for fact in facts(run):
        value = Text.assemble((fact.value, COLORS[fact.tone]), (f"  {fact.detail}", "dim"))
        table.add_row(fact.label, value)
    return table


def _curves(run: Run, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for key, label in CURVES.items():
        steps, values = run.series(key)
        if not values:
            table.add_row(label, Text(NOT_MEASURED, style="dim"), "", "")
            continue
        table.add_row(
            label,
            Text(spark(values, max(8, min(60, width - 48))), style="cyan"),
            number(values[-1]),
            f"step {steps[-1]}",
        )
    return table


def spark(values: list[float], width: int) -> str:
    """The values as bars of eight heights, from the smallest to the largest; a bar stands for the mean of its bin."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(BARS[round((m - low) / span * 7) if span > 0 else 0] for m in means)


def _checks(run: Run, width: int) -> RenderableType:
    found = rows(run)
    if not found:
        return Text("no check has left a result", style="dim")
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for row in found:
        lights = Text.assemble(*(LIGHTS[light.state] for light in row.lights[-max(8, min(60, width - 48)) :]))
        table.add_row(row.check, lights, Text(row.summary, style="bold red" if row.off else "dim"))
    return table


def _incident(incident: dict[str, object]) -> Panel:
    lines = [
        f"{key.replace('_', ' ')}: {incident[key]}"
        for key in ("expected", "found", "likely_cause", "action")
        if incident.get(key)
    ]
    title = f"{incident.get('check')} at step {incident.get('step')}, version {incident.get('version')}"
    return Panel(Text("\n".join(lines)), title=Text(title), title_align="left", border_style="red")
