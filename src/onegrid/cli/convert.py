"""`onegrid convert`: a checkpoint in another format and layout, with progress."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onegrid.cli.plan import read_recipe
from onegrid.convert.contents import pattern
from onegrid.convert.convert import Report, convert


def run(source: Path, target: Path, recipe: str, *, layout: str | None, shard_bytes: int, overwrite: bool) -> Report:
    """Convert and print what was written and where every key of the source went; arguments as for `convert`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("converting", total=None)

        def on_tensor(name: str, place: int, total: int) -> None:
            progress.update(task, completed=place, total=total, description=name)

        report = convert(
            source,
            target,
            read_recipe(recipe),
            layout=layout,
            max_shard_bytes=shard_bytes,
            overwrite=overwrite,
            on_tensor=on_tensor,
        )
    _print(report, target)
    return report


def _print(report: Report, target: Path) -> None:
    quantized = [t for t in report.plan.tensors.values() if t.sampler_weight is not None]
    print(f"{target}: {len(report.files)} files, {report.num_bytes / 1e6:.1f} MB, {report.layout or 'BF16'}")
    if report.reused:
        print(f"  {len(report.reused)} files of an earlier attempt were used")
    print(f"  {len(quantized)} of {len(report.plan.tensors)} tensors quantized; plan digest {report.plan.digest}")
    elsewhere = {k: v for k, v in report.dropped.items() if not v.startswith("in ")}
    print(f"  {len(report.dropped) - len(elsewhere)} keys of the source under other names")
    for (key, reason), count in Counter((pattern(k), v) for k, v in elsewhere.items()).items():
        print(f"  not written: {key}{f' ({count} keys)' if count > 1 else ''}: {reason}")
    for name in report.extra:
        print(f"  kept beyond the main model: {name}")
    for note in report.notes:
        print(f"  note: {note}")
