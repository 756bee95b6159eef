"""`onegrid train`: from a configuration to a run directory."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onegrid.config import RunConfig, load_config, to_toml
from onegrid.errors import ConfigError, StoppedError
from onegrid.guard.config import CHECKS
from onegrid.guard.guard import Guard, guard_of
from onegrid.rl import checkpoint
from onegrid.rl.debug import sample_only
from onegrid.rl.draw import Drawing
from onegrid.rl.out_of_memory import advised
from onegrid.rl.progress import Display
from onegrid.rl.record import Record, check_whole, free_run_folder, last_run_folder, num_lines, read_metrics, versions
from onegrid.rl.stop import Stop, stop_on_signals
from onegrid.rl.tasks import Summarizes, closing_task
from onegrid.study.estimate import memory_estimate
from onegrid.study.parts import Design, Parts, build, design, draw_once, problems, train_parts
from onegrid.study.same_run import BEGAN_WITH, first_of, refuse_another_start, refuse_changes
from onegrid.study.samplers import closing_sampler
from onegrid.tracker.trackers import Trackers, check_installed


def run(
    path: Path, overrides: Sequence[str], *, run_dir: Path | None, num_steps: int | None, resume: bool, dry_run: bool
) -> None:
    """See `onegrid train --help`.

    Raises StoppedError after a signal, once the checkpoint is written.
    """
    console = Console(highlight=False)
    steps = [] if num_steps is None else [f"loop.num_steps={num_steps}"]
    plan = design(load_config(path, [*overrides, *steps]), path.parent)
    if dry_run:
        _describe(plan, console)
        return
    check_installed(plan.config.trackers)
    if resume and plan.config.debug.rollouts_only:
        raise ConfigError("--resume goes on from a checkpoint, and rollouts only leave none; name another --run-dir")
    folder = _folder(path, run_dir, resume=resume)
    last = checkpoint.latest(folder) if resume else None
    begun = bool(last) or (resume and (folder / "config.toml").exists())
    for key in refuse_changes(folder, plan.config) if begun else []:
        console.print(f"{key} is another now: tokens stay the same, sums of gradients may differ in their last bits")
    state = checkpoint.load(last, plan.config.device) if last else None
    config = plan.config
    if state and state["step"] > config.loop.num_steps:
        raise ConfigError(
            f"loop.num_steps is {config.loop.num_steps}, but {folder} has done {state['step']} steps already; "
            "give as many or more"
        )
    with stop_on_signals() as stop:
        _train(plan, folder, state, console, stop, resume=resume)
    console.print(summary(folder))


def _train(
    plan: Design, folder: Path, state: dict[str, Any] | None, console: Console, stop: Stop, *, resume: bool
) -> None:
    with advised("start"):
        parts = build(plan)
    with closing_task(parts.task), closing_sampler(parts.sampler):
        first, held_out = draw_once(parts.task, plan.config)
        began = first_of(parts.learner, parts.task, [*first, *held_out])
        made_with = {**versions(), "pins": parts.proof.as_record(), "matmuls": parts.matmuls, BEGAN_WITH: began}
        if state:
            refuse_another_start(folder, made_with, partial(console.print, markup=False, soft_wrap=True))
        _recorded(plan, parts, folder, state, console, stop, made_with=made_with, resume=resume)


def _recorded(
    plan: Design,
    parts: Parts,
    folder: Path,
    state: dict[str, Any] | None,
    console: Console,
    stop: Stop,
    *,
    made_with: dict[str, Any],
    resume: bool,
) -> None:
    config = plan.config
    model = Path(config.model.checkpoint).name
    guard = guard_of(config.guard, parts.learner, parts.sampler, model=model)  # may refuse: before anything is written
    resume_step = (state["step"] if state else -1) if resume else None
    lost = num_lines(folder / "metrics.jsonl") if resume and not state else 0
    record = Record(folder, config=config.record, resume_step=resume_step)
    if state:
        check_whole(folder, state["step"])
    record.text("config.toml", to_toml(config))
    record.text("plan.json", plan.plan.to_json())
    record.text("versions.json", json.dumps(made_with, indent=1, sort_keys=True) + "\n")
    display = Display(config.loop.num_steps, done=state["step"] if state else 0, console=console)
    with _tracked(config, record, display), display:
        display.note(f"run {folder}" + (f", going on from step {state['step']}" if state else ""))
        if resume and not state:
            dropped = f", and the {lost} lines of metrics that were there are dropped" if lost else ""
            display.note(f"--resume: {folder} has no checkpoint, so the run begins anew{dropped}")
        for line in [*plan.plan.summary(), *([parts.task.summary()] if isinstance(parts.task, Summarizes) else [])]:
            display.note(line)
        try:
            if config.debug.rollouts_only:
                _sample_only(config, parts, guard, record, display, stop)
                return
            train_parts(parts, config, guard=guard, record=record, display=display, state=state, stop=stop)
        except (KeyboardInterrupt, StoppedError):
            display.note(f"interrupted; go on with --resume --run-dir {folder}")
            raise


def _sample_only(config: RunConfig, parts: Parts, guard: Guard, record: Record, display: Display, stop: Stop) -> None:
    drawing = Drawing(
        task=parts.task,
        sampler=parts.sampler,
        config=config.loop,
        dynamic=config.dynamic,
        sampling=config.sampling,
        seed=config.seed,
    )
    sample_only(
        drawing,
        parts.learner,
        guard=guard,
        num_steps=config.loop.num_steps,
        tokenizer=parts.tokenizer,
        record=record,
        display=display,
        stop=stop,
    )


def summary(folder: Path) -> Table:
    """What a person wants to know at the end of a run, from its own record."""
    lines = read_metrics(folder)
    steps = [line for line in lines if line["step"]]
    accuracy = [(line["step"], line["eval/held_out/accuracy"]) for line in lines if "eval/held_out/accuracy" in line]
    table = Table(title="done", show_header=False, title_justify="left")
    if accuracy:
        table.add_row("held-out accuracy before", f"{accuracy[0][1]:.3f}")
        table.add_row("held-out accuracy after", f"{accuracy[-1][1]:.3f} (step {accuracy[-1][0]})")
    apart: list[Any] = [line["mismatch/max_abs"] for line in steps if "mismatch/max_abs" in line]
    equal: list[Any] = [line["mismatch/share_equal"] for line in steps if "mismatch/share_equal" in line]
    if apart:
        table.add_row("mismatch, largest of any token", f"{max(apart):.3g} nats")
        least = "all" if min(equal) == 1.0 else f"at least {min(equal):.2%}"
        table.add_row("log-probabilities of equal bits", f"{least}, in every step")
    checks = [value for line in steps for key, value in line.items() if key.startswith("guard/")]
    if checks:
        counts = [sum(value == wanted for value in checks) for wanted in (1, 0, -1)]
        told = "{} passed, {} failed, {} could not tell".format(*counts)
        met = num_lines(folder / "incidents.jsonl")
        told += f", {met} incident{'s' * (met != 1)}" if met else ""
        silent = [check for check in CHECKS if not any(f"guard/{check}" in line for line in steps)]
        table.add_row("checks", told + (f"; not asked: {', '.join(silent)}" if silent else ""))
    seconds: list[Any] = [line.get("perf/step_seconds", 0.0) for line in steps]
    table.add_row("time", f"{sum(seconds):.0f} s in {len(steps)} steps")
    table.add_row("run directory", str(folder))
    table.add_row("curves, checks, rollouts", f"onegrid report {folder}")
    return table


@contextmanager
def _tracked(config: RunConfig, record: Record, display: Display) -> Iterator[None]:
    """While it lasts, trackers hear what the record writes, and first what they have missed."""
    settings = tomllib.loads(to_toml(config))
    past = read_metrics(record.folder)
    with Trackers(config.trackers, record.folder, settings=settings, past=past, say=display.note) as trackers:
        record.listener = trackers.log
        yield


def _folder(path: Path, run_dir: Path | None, *, resume: bool) -> Path:
    if run_dir is not None:
        return run_dir
    runs = Path("runs")
    last = last_run_folder(runs, path.stem) if resume else None
    return last or free_run_folder(runs, path.stem)


def _describe(plan: Design, console: Console) -> None:
    """What `--dry-run` prints: configuration, plan, memory and step plan."""
    config = plan.config
    console.print(to_toml(config), markup=False, soft_wrap=True)
    console.print(plan.plan.table(), markup=False, soft_wrap=True)
    table = Table(title="memory estimate", title_justify="left", show_header=False)
    for what, num_bytes in memory_estimate(plan).items():
        table.add_row(what, f"{num_bytes / 2**20:.1f} MiB")
    console.print(table)
    loop, sampling = config.loop, config.sampling
    sequences = loop.prompts_per_step * loop.samples_per_prompt
    table = Table(title="step plan", title_justify="left", show_header=False)
    table.add_row("steps", str(loop.num_steps))
    table.add_row("a step", f"{loop.prompts_per_step} prompts x {loop.samples_per_prompt} samples, one update")
    table.add_row("response tokens", f"at most {sequences * sampling.max_new_tokens} a step")
    table.add_row("micro-batches", f"of at most {config.learner.max_tokens} rows")
    off_policy = "made while the one before is learned" if loop.off_policy_steps else "made and learned in its step"
    table.add_row("a batch", off_policy)
    answers = f"greedy and {config.eval.samples} sampled" if config.eval.samples else "greedy"
    often = f", and every {config.eval.every} steps" if config.eval.every else ""
    judged = f"{config.eval.num_problems} held-out problems, {answers}, before and after{often}"
    table.add_row("evaluation", judged if config.eval.num_problems else "none")
    _, task = problems(plan)
    with closing_task(task):
        prompts, held_out = draw_once(task, config)
    drawn = [*prompts, *held_out]
    if drawn:
        lengths = [len(prompt.tokens) for prompt in drawn]
        what = f"{len(prompts)} of the first step and {len(held_out)} held-out ones drawn"
        table.add_row("problems", f"{what}, {min(lengths)} to {max(lengths)} tokens")
        table.add_row("the first one", Text(f"{drawn[0].text!r}, answer {drawn[0].answer!r}"))
    console.print(table)
