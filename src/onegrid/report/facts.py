"""The headline of a run: a handful of numbers, each with what it rests on, or "not measured"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Any, Literal

from onegrid.report.reading import Run, is_number

NOT_MEASURED = "not measured"
Tone = Literal["", "good", "bad", "unsure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line of the headline."""

    label: str
    value: str
    detail: str = ""
    tone: Tone = ""
    exact: tuple[float, ...] = ()
    """The numbers in `value` as the record has them."""


def facts(run: Run) -> list[Fact]:
    """Mismatch, reward, held-out results, checks, progress and speed, in this order."""
    return [mismatch(run), _reward(run), *_held_out(run), _checks(run), _progress(run), _speed(run), _time(run)]


def identity(run: Run) -> list[Fact]:
    """Model, recipe, device and software, for the lines below the title."""
    return [_model(run), _recipe(run), _device(run), _software(run)]


def _progress(run: Run) -> Fact:
    wanted, done = run.num_steps, run.last_step
    if wanted is None:
        return Fact(label="Steps", value=f"{done:,}", detail="of an unknown number", exact=(done,))
    finished = done >= wanted
    stopped = "stopped by a check" if run.incidents and not finished else "not finished"
    return Fact(
        label="Steps",
        value=f"{done:,} of {wanted:,}",
        detail="finished" if finished else stopped,
        tone="" if finished else "unsure",
        exact=(done, wanted),
    )


def _reward(run: Run) -> Fact:
    steps, values = run.series("rollout/raw_reward")
    if not values:
        return Fact(label="Reward", value=NOT_MEASURED)
    if len(values) == 1:
        return Fact(label="Reward", value=number(values[0]), detail=f"step {steps[0]} alone", exact=(values[0],))
    return Fact(
        label="Reward",
        value=f"{number(values[0])} → {number(values[-1])}",
        detail=f"mean of the rollouts of step {steps[0]:,} and of step {steps[-1]:,}",
        exact=(values[0], values[-1]),
    )


def eval_sets(run: Run) -> list[str]:
    """Names of held-out sets that have an accuracy."""
    found = (re.fullmatch(r"eval/(.+)/accuracy", key) for key in run.keys("eval/"))
    return [match[1] for match in found if match]


def _held_out(run: Run) -> list[Fact]:
    return [_accuracy(run, name) for name in eval_sets(run)] or [Fact(label="Held-out accuracy", value=NOT_MEASURED)]


def _accuracy(run: Run, name: str) -> Fact:
    label = "Held-out accuracy" if name == "held_out" else f"Accuracy, {name}"
    lines = [line for line in run.lines if is_number(line.get(f"eval/{name}/accuracy"))]
    ends = lines if len(lines) == 1 else [lines[0], lines[-1]]
    values = tuple(line[f"eval/{name}/accuracy"] for line in ends)
    intervals = [_interval(line, name) for line in ends]
    problems = ends[-1].get(f"eval/{name}/problems")
    detail = [f"{int(problems):,} problems" if is_number(problems) else "", f"step {ends[0]['step']:,}"]
    detail[-1] += f" and step {ends[1]['step']:,}" if len(ends) == 2 else " alone: nothing to compare with"
    if all(intervals):
        detail.insert(0, f"95 % interval{'s' if len(ends) == 2 else ''} {' → '.join(intervals)}")
    apart = len(ends) == 2 and all(intervals) and _low(ends[1], name) > _high(ends[0], name)
    return Fact(
        label=label,
        value=" → ".join(map(number, values)),
        detail="; ".join(part for part in detail if part),
        tone="good" if apart else "",
        exact=values,
    )


def _low(line: dict[str, Any], name: str) -> float:
    return float(line[f"eval/{name}/accuracy_low"])


def _high(line: dict[str, Any], name: str) -> float:
    return float(line[f"eval/{name}/accuracy_high"])


def _interval(line: dict[str, Any], name: str) -> str:
    ends = [line.get(f"eval/{name}/accuracy_{end}") for end in ("low", "high")]
    return "–".join(f"{end:.3f}" for end in ends) if all(map(is_number, ends)) else ""


def mismatch(run: Run) -> Fact:
    """Largest difference of two log-probabilities of a token, learner against sampler, over all steps."""
    steps, values = run.series("mismatch/max_abs")
    if not values:
        return Fact(label="Mismatch", value=NOT_MEASURED, detail="no step compared learner and sampler", tone="unsure")
    _, equal = run.series("mismatch/share_equal")
    _, tokens = run.series("mismatch/tokens")
    compared = f"{int(sum(tokens)):,} log-probs" if len(tokens) == len(values) else "log-probs (not counted)"
    largest, exact = max(values), run.plan.get("exact")
    where = f"in all {len(steps):,} steps" if largest == 0 else f"largest, in step {steps[values.index(largest)]:,}"
    if len(equal) < len(values):
        bits = f"; {compared} compared, whether as bytes is not recorded"
    elif min(equal) == 1:
        bits = f"; {compared} compared as bytes, all equal"
    else:
        bits = f"; {compared} compared as bytes, {100 * min(equal):.3g} % or more equal in every step"
    tone: Tone = "good" if largest == 0 else "bad" if exact else ""
    promise = "; the plan promises equal bits" if exact and largest else ""
    value = "0" if largest == 0 else f"{largest:.3g} nats"
    return Fact(label="Mismatch", value=value, detail=where + bits + promise, tone=tone, exact=(largest,))


def _checks(run: Run) -> Fact:
    values = [v for line in run.steps for k, v in line.items() if k.startswith("guard/") and is_number(v)]
    by_step = {line["step"]: line for line in run.steps}
    stopped = [i for i in run.incidents if f"guard/{i.get('check')}" not in by_step.get(i.get("step"), {})]
    if not values and not stopped:
        return Fact(label="Checks", value=NOT_MEASURED, detail="no check has left a result", tone="unsure")
    passed, failed, unsure = (sum(value == wanted for value in values) for wanted in (1, 0, -1))
    failed += len(stopped)
    off = run.table("guard").get("off") or []
    incidents = f"{len(run.incidents):,} incident" + "s" * (len(run.incidents) != 1)
    parts = [f"passed; {failed:,} failed", f"{unsure:,} could not tell", incidents]
    parts += [f"switched off: {', '.join(map(str, off))}"] if off else []
    return Fact(
        label="Checks",
        value=f"{passed:,} of {len(values) + len(stopped):,}",
        detail=", ".join(parts),
        tone="bad" if failed or off else "unsure" if unsure else "good",
        exact=(passed, len(values) + len(stopped)),
    )


def _speed(run: Run) -> Fact:
    _, values = run.series("perf/rollout_tokens_per_second")
    if not values:
        return Fact(label="Sampler speed", value=NOT_MEASURED)
    middle = median(values)
    return Fact(label="Sampler speed", value=f"{middle:,.0f} tokens/s", detail="median over steps", exact=(middle,))


def _time(run: Run) -> Fact:
    _, values = run.series("perf/step_seconds")
    if not values:
        return Fact(label="Time", value=NOT_MEASURED)
    return Fact(
        label="Time",
        value=duration(sum(values)),
        detail=f"in {len(values):,} steps, {median(values):.3g} s a step (median); start and loading not counted",
        exact=(sum(values),),
    )


def _model(run: Run) -> Fact:
    name = run.table("model").get("checkpoint")
    return Fact(label="Model", value=PurePath(str(name)).name if name else "not recorded")


def _recipe(run: Run) -> Fact:
    plan = run.plan
    if not plan:
        return Fact(label="Recipe", value="not recorded")
    tensors = [t for t in plan.get("tensors", []) if isinstance(t, dict)]
    quantized = sum(bool(t.get("weight")) for t in tensors)
    pairing = "exact pairing" if plan.get("exact") else "pairing not exact"
    return Fact(
        label="Recipe",
        value=str(plan.get("recipe_name", "unnamed")),
        detail=f"{pairing}, {quantized:,} of {len(tensors):,} tensors quantized",
    )


def _device(run: Run) -> Fact:
    versions = run.versions
    if not versions:
        return Fact(label="Device", value="not recorded")
    device = str(run.config.get("device", ""))
    gpu = str(versions.get("gpu", "none"))
    on_cpu = device == "cpu" or gpu == "none"
    threads = str(versions.get("threads", "?"))
    value = f"CPU, {versions.get('cpu', '?')}, {threads} thread{'s' * (threads != '1')}" if on_cpu else gpu
    pins = versions.get("pins")
    if not isinstance(pins, dict):
        return Fact(label="Device", value=value, detail="order of sums: proof not recorded")
    proved = "order of sums proved at start" if pins.get("passed") else "order of sums NOT proved"
    return Fact(label="Device", value=value, detail=proved, tone="" if pins.get("passed") else "bad")


def _software(run: Run) -> Fact:
    names = ("onegrid", "torch", "python")
    known = [
        f"{name} {run.versions[name]}" for name in names if run.versions.get(name, "not installed") != "not installed"
    ]
    return Fact(label="Software", value=", ".join(known) or "not recorded")


def number(value: float) -> str:
    """Three significant digits or more, without an exponent where a person would not use one."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Keys of the configurations that are not the same in all runs, each with the value of every run ("-": none)."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [str(one.get(key, "–")) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        found += _flat(value, name) if isinstance(value, dict) else [(name, value)]
    return found
