"""`onegrid eval`: how good a checkpoint is on problems that no training saw, alone or against another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onegrid.config import RunConfig, load_config
from onegrid.errors import ConfigError
from onegrid.mismatch.statistics import Interval
from onegrid.rl import checkpoint as checkpoints
from onegrid.rl.evaluate import Evaluated, compare_greedy, default_ks, judge
from onegrid.rl.loop import snapshot
from onegrid.rl.tasks import closing_task
from onegrid.study.parts import build, design
from onegrid.sync import push


def run(
    checkpoint: Path,
    overrides: Sequence[str],
    *,
    config: Path | None,
    against: Path | None,
    problems: int | None,
    samples: int,
    ks: Sequence[int],
    as_json: bool,
) -> None:
    """See `onegrid eval --help`."""
    if against is not None:
        checkpoints.state_folder(against)  # for its error, before the work on the first
    found = [
        evaluated(path, overrides, config=config, problems=problems, samples=samples, ks=ks)
        for path in (checkpoint, *([against] if against else []))
    ]
    difference = compare_greedy(found[1], found[0]) if against else None
    if as_json:
        metrics = found[0].metrics()
        if difference is not None:
            metrics |= {"eval/held_out/gain": difference.estimate}
            metrics |= {"eval/held_out/gain_low": difference.low, "eval/held_out/gain_high": difference.high}
        print(json.dumps(metrics, sort_keys=True))
        return
    names = [str(checkpoint), *([str(against)] if against else [])]
    Console(highlight=False).print(table(names, found, difference))


def evaluated(
    path: Path, overrides: Sequence[str], *, config: Path | None, problems: int | None, samples: int, ks: Sequence[int]
) -> Evaluated:
    """One checkpoint, judged.

    path    a folder of a run's `checkpoints/`, with or without its number, or a Hugging Face folder
    config  the configuration; by default that of the run that the checkpoint is of
    Raises ConfigError where neither gives a configuration.
    """
    folder = checkpoints.state_folder(path)
    run_config = _config(path, folder, config, overrides)
    base = config.parent if config else Path()
    plan = design(replace(run_config, loop=replace(run_config.loop, reference_every=0)), base)
    parts = build(plan)
    if folder is not None:
        parts.learner.load_state_dict(checkpoints.load(folder, plan.config.device)["learner"])
    push(snapshot(parts.learner), parts.sampler)
    with closing_task(parts.task):
        return judge(
            parts.task,
            parts.sampler,
            num_problems=problems or plan.config.eval.num_problems,
            samples=samples,
            ks=ks or default_ks(samples),
            sampling=plan.config.sampling,
            seed=plan.config.seed,
            threshold=plan.config.eval.threshold,
        )


def table(names: Sequence[str], found: Sequence[Evaluated], difference: Interval | None) -> Table:
    """One column a checkpoint."""
    out = Table(title=f"{found[0].num_problems} held-out problems", title_justify="left")
    for name in ("", *names):
        out.add_column(name)
    out.add_row("greedy accuracy", *(_shown(e.greedy) for e in found))
    if found[0].sampled is not None:
        out.add_row("sampled reward", *(_shown(e.sampled) for e in found))
    for k in found[0].pass_at:
        out.add_row(f"pass@{k}", *(_shown(e.pass_at.get(k)) for e in found))
    out.add_row("response tokens", *(f"{e.response_length:.1f}" for e in found))
    out.add_row("truncated", *(f"{e.truncated_share:.1%}" for e in found))
    out.add_row("unscorable", *(str(e.unscorable) for e in found))
    if difference is not None:
        out.add_row("gain of the first", _shown(difference))
    return out


def _shown(share: Interval | None) -> str:
    return "" if share is None else f"{share.estimate:.3f} ({share.low:.3f} to {share.high:.3f})"


def _config(path: Path, folder: Path | None, config: Path | None, overrides: Sequence[str]) -> RunConfig:
    model = [] if folder else [f"model.checkpoint={path.resolve()}"]
    if config is not None:
        return load_config(config, [*model, *overrides])
    if folder is None:
        raise ConfigError(f"{path} belongs to no run; name a configuration with the task (--config)")
    return load_config(folder.parent.parent / "config.toml", overrides)
