"""`onegrid faults`: the list of faults, and the campaign that tries them all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from onegrid.guard.faults import FAULTS, fault
from onegrid.study.campaign import Outcome, run_faults
from onegrid.study.corruptions import run_corruptions, run_healthy
from onegrid.study.fault_report import markdown, problems, rows
from onegrid.study.kills import run_kills

SIZES = {"quick": 100, "full": 1000}
"""Random corruptions, and healthy synchronizations, of a campaign."""
KILLS = {"quick": 5, "full": 100}
"""Runs that are killed in a synchronization."""


def list_faults() -> None:
    """Print every fault with what it breaks and which checks must object."""
    table = Table(title="faults", title_justify="left")
    for column in ("name", "breaks", "what", "seen by"):
        table.add_column(column, overflow="fold")
    for f in FAULTS.values():
        table.add_row(f.name, f.condition, f.what, ", ".join(f.fires) or "nothing: it is no fault")
    Console(highlight=False).print(table)


def run(campaign: str | None, names: tuple[str, ...], *, seed: int, json_file: Path | None, page: Path | None) -> None:
    """See `onegrid faults --help`."""
    console = Console(highlight=False)
    chosen = [fault(name) for name in names] if names else list(FAULTS.values())
    torch.set_num_threads(1)  # tensors are so small that threads only wait for each other
    began = time.perf_counter()

    def done(o: Outcome) -> None:
        seen = f"{o.caught_by or 'nothing'} at {o.at}" if o.caught_by else "nothing objected"
        good = o.as_claimed and o.named_right and o.safe
        console.print(f"{'ok ' if good else 'BAD'} {o.fault:26} {seen}", soft_wrap=True)

    kills = None
    if campaign is not None and not names:
        with TemporaryDirectory() as folder:  # first: it forks, and must not have computed anything before
            kills = run_kills(KILLS[campaign], seed, Path(folder))
        console.print(f"{kills.same} of {kills.num} runs end in the same bytes after kill -9 and resume")
    outcomes = run_faults(chosen, on_done=done)
    corruptions = healthy = None
    if campaign is not None and not names:
        count = SIZES[campaign]
        corruptions = run_corruptions(count, seed)
        console.print(f"{corruptions.alarms} of {count} random corruptions caught, {corruptions.named_right} named")
        healthy = run_healthy(count, seed)
        console.print(f"{healthy.alarms} false alarms in {count} healthy synchronizations")
    wrong = problems(outcomes, corruptions, healthy, kills)
    if json_file is not None:
        found = rows(outcomes, corruptions, healthy)
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if page is not None:
        command = f"onegrid faults --campaign {campaign} --page {page}"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(markdown(command, outcomes, corruptions, healthy, kills), encoding="utf-8")
    console.print(f"{len(outcomes)} faults in {time.perf_counter() - began:.0f} s")
    for line in wrong:
        console.print(f"BAD {line}", soft_wrap=True, markup=False)
    if wrong:
        raise SystemExit(1)
