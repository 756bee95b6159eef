"""`onegrid faults`: the list of faults, and the campaign that tries them all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from onegrid.cli.files import write_file
from onegrid.errors import CapabilityError
from onegrid.guard.faults import FAULTS, fault
from onegrid.sampler.engine import SamplerConfig
from onegrid.study.campaign import Outcome, try_alone
from onegrid.study.corruptions import run_corruptions, run_healthy
from onegrid.study.fault_report import markdown, problems, rows
from onegrid.study.kills import Kills, run_kills
from onegrid.study.parts import find_device
from onegrid.study.segments import in_segments, kept, kills_in_segments, read_outcome

SIZES = {"quick": 100, "full": 1000}
"""Random corruptions, and healthy synchronizations, of a campaign."""
USUAL = ("cpu", "auto")
"""Device and weights that need no option."""
KILLS = {"quick": 5, "full": 100}
"""Runs that are killed in a synchronization."""


def list_faults() -> None:
    """Print every fault with what it breaks and which checks must object."""
    table = Table(title="faults", title_justify="left")
    table.add_column("name", no_wrap=True, overflow="ignore", min_width=max(map(len, FAULTS)))  # to be typed
    for column in ("breaks", "what", "seen by"):
        table.add_column(column, overflow="fold")
    for f in FAULTS.values():
        table.add_row(f.name, f.condition, f.what, ", ".join(f.fires) or "nothing: it is no fault")
    Console(highlight=False).print(table)


def run(
    campaign: str | None,
    names: tuple[str, ...],
    *,
    seed: int,
    json_file: Path | None,
    page: Path | None,
    work: Path | None = None,
    device: str = "cpu",
    weights: str = "auto",
) -> None:
    """See `onegrid faults --help`. ConfigError, before anything is tried, where a file cannot be written."""
    SamplerConfig(weights=weights)  # for its error
    console = Console(highlight=False)
    chosen = [fault(name) for name in names] if names else list(FAULTS.values())
    for option, file in (("--json", json_file), ("--page", page)):
        if file is not None:
            write_file(option, file, None)
    torch.set_num_threads(1)  # tensors are so small that threads only wait for each other
    began = time.perf_counter()

    def progress(what: str) -> Callable[[int], None]:
        return lambda count: console.print(f"{count} {what}, {time.perf_counter() - began:.0f} s", soft_wrap=True)

    def killed(count: int, own_seed: int) -> Kills:
        with TemporaryDirectory() as folder:
            return run_kills(count, own_seed, Path(folder))

    kills = corruptions = healthy = None
    device = find_device(device)
    whole = campaign is not None
    special = [(option, value) for option, value in (("device", device), ("weights", weights)) if value not in USUAL]
    kind = "".join(f"_{value}" for _, value in special)
    if whole and device == "cpu":  # first: it forks, and must not have computed anything before
        kills = kills_in_segments(killed, KILLS[str(campaign)], seed, work, progress("runs killed and resumed"))
        console.print(f"{kills.same} of {kills.num} runs end in the same bytes after kill -9 and resume")
    outcomes: list[Outcome] = []
    absent: list[str] = []
    crashed: list[str] = []
    for each in chosen:
        try:
            o = kept(work, f"fault_{each.name}{kind}", partial(try_alone, each, device, weights), read_outcome)
        except CapabilityError as error:
            console.print(f"--  {each.name:26} {error}", soft_wrap=True)
            absent.append(each.name)
            continue
        except RuntimeError as error:  # the others are still worth knowing
            crashed.append(f"{each.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        outcomes.append(o)
        seen = f"{o.caught_by} at {o.at}" if o.caught_by else "nothing objected"
        good = o.as_claimed and o.named_right and o.safe
        console.print(f"{'ok ' if good else 'BAD'} {o.fault:26} {seen}", soft_wrap=True)
    if whole:
        count = SIZES[str(campaign)]
        corruptions = in_segments(
            partial(run_corruptions, device=device, weights=weights),
            count,
            seed,
            work,
            f"corruptions{kind}",
            progress("random corruptions"),
        )
        console.print(f"{corruptions.alarms} of {count} random corruptions caught, {corruptions.named_right} named")
        healthy = in_segments(
            partial(run_healthy, device=device, weights=weights),
            count,
            seed,
            work,
            f"healthy{kind}",
            progress("healthy synchronizations"),
        )
        console.print(f"{healthy.alarms} false alarms in {count} healthy synchronizations")
    wrong = [*crashed, *problems(outcomes, corruptions, healthy, kills)]
    if json_file is not None:
        found = rows(outcomes, corruptions, healthy)
        write_file("--json", json_file, json.dumps(found, indent=1) + "\n")
    if page is not None:
        options = "".join(f" --{option} {value}" for option, value in special)
        what = f"--campaign {campaign}" if campaign else " ".join(names)
        command = f"onegrid faults {what}{f' --seed {seed}' if seed and whole else ''}{options} --page {page}"
        write_file("--page", page, markdown(command, outcomes, corruptions, healthy, kills, absent))
    console.print(f"{len(outcomes)} faults in {time.perf_counter() - began:.0f} s")
    for line in wrong:
        console.print(f"BAD {line}", soft_wrap=True, markup=False)
    if wrong:
        raise SystemExit(1)
