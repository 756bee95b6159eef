"""What is drawn: for every chart its lines as numbers from the records, ready for the plotting library of the page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from onegrid.report.facts import eval_sets
from onegrid.report.reading import Run, is_number

MAX_POINTS = 2000
"""Per line; of longer runs every bin of steps shows its smallest and its largest value, so that no peak is lost."""

MEAN_OF = 10
"""Steps of the running mean of a noisy line; drawn where there are twice as many."""

STAGES = ("rollout", "scoring", "reference", "logprob", "update", "sync", "eval")

LINES: list[dict[str, Any]] = [
    {
        "id": "reward",
        "section": "learning",
        "title": "Reward",
        "note": "Mean over the rollouts of a step; points with bars are held-out accuracy with its 95 % interval.",
        "keys": {"rollout/raw_reward": "reward"},
        "smooth": True,
    },
    {
        "id": "length",
        "section": "learning",
        "title": "Response length",
        "unit": "tokens",
        "note": "Mean of a step, in a band from the shortest to the longest.",
        "keys": {
            "rollout/response_length": "mean",
            "rollout/response_length_min": "shortest",
            "rollout/response_length_max": "longest",
        },
        "band": ("rollout/response_length_min", "rollout/response_length_max"),
        "from_zero": True,
    },
    {
        "id": "truncated",
        "section": "learning",
        "title": "Cut at the cap",
        "unit": "share",
        "note": "Share of rollouts that were cut at the cap instead of ending themselves.",
        "keys": {"rollout/truncated_share": "cut"},
        "from_zero": True,
    },
    {
        "id": "entropy",
        "section": "learning",
        "title": "Entropy",
        "unit": "nats",
        "note": "Of the next token, mean over response tokens.",
        "keys": {"train/entropy": "entropy"},
        "from_zero": True,
    },
    {
        "id": "groups",
        "section": "learning",
        "title": "Groups that teach nothing",
        "unit": "share",
        "note": "Share of prompts whose rollouts all got one reward, and distinct answers per rollout.",
        "keys": {"rollout/constant_groups": "constant groups", "rollout/distinct_answers": "distinct answers"},
        "from_zero": True,
    },
    {
        "id": "reference",
        "section": "learning",
        "title": "Distance from the start",
        "unit": "nats",
        "note": "KL divergence from the policy of the start, where it was measured.",
        "keys": {"train/ref_kl": "KL to the start"},
        "from_zero": True,
    },
    {
        "id": "mismatch",
        "section": "mismatch",
        "title": "Mismatch",
        "unit": "nats",
        "note": "Learner against sampler, log-probability of the same token at the same version.",
        "keys": {"mismatch/max_abs": "largest of a token", "mismatch/p99": "99th percentile", "mismatch/kl": "KL (k1)"},
        "zero": True,
    },
    {
        "id": "equal",
        "section": "mismatch",
        "title": "Log-probs of equal bits",
        "unit": "share",
        "note": "Share of tokens whose two log-probabilities are the same four bytes.",
        "keys": {"mismatch/share_equal": "equal"},
        "top": 1.0,
    },
    {
        "id": "changed",
        "section": "mismatch",
        "title": "Codes that a version moved",
        "unit": "share",
        "note": "Share of element codes and scales that differ from the version before.",
        "keys": {"sync/codes_changed_share": "changed"},
        "from_zero": True,
    },
    {
        "id": "gradient",
        "section": "gradients",
        "title": "Gradient norm",
        "note": "Of all weights, before clipping.",
        "keys": {"train/grad_norm": "norm"},
        "from_zero": True,
    },
    {
        "id": "clip",
        "section": "gradients",
        "title": "Clipped tokens",
        "unit": "share",
        "note": "Share of tokens whose ratio was clipped, above and below.",
        "keys": {"train/clip_high": "above", "train/clip_low": "below"},
        "from_zero": True,
    },
    {
        "id": "rate",
        "section": "gradients",
        "title": "Learning rate",
        "note": "Of the optimizer, with warm-up and decay.",
        "keys": {"train/lr": "rate"},
        "from_zero": True,
    },
    {
        "id": "speed",
        "section": "time",
        "title": "Sampler speed",
        "unit": "tokens/s",
        "note": "Response tokens over the time that the step's rollouts took.",
        "keys": {"perf/rollout_tokens_per_second": "tokens/s"},
        "from_zero": True,
    },
    {
        "id": "memory",
        "section": "time",
        "title": "Memory, high-water mark",
        "unit": "bytes",
        "note": "The most that the process has held up to a step.",
        "keys": {"perf/gpu_memory_bytes": "GPU", "perf/host_memory_bytes": "host"},
        "from_zero": True,
    },
]


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All charts that have at least one number, and for the others only their title and why they are empty."""
    found = [*(_lines(spec, runs) for spec in (*LINES, *_each_reward(runs))), *_passes(runs)]
    for i, run in enumerate(runs):
        for make in (_gradient_groups, _stages):
            found.append(make(run, i, len(runs) > 1))
    return found


def _lines(spec: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    chart = {key: value for key, value in spec.items() if key != "keys"} | {"kind": "lines", "series": []}
    measured = [key for key in spec["keys"] if any(run.series(key)[1] for run in runs)]
    if len(runs) > 1 and len(measured) > 1:  # one line a run, or nobody can tell them apart
        measured = measured[:1]
        chart["note"] = f"{spec.get('note', '')} Of several runs: {spec['keys'][measured[0]]}.".strip()
    for i, run in enumerate(runs):
        for j, key in enumerate(measured):
            steps, values = run.series(key)
            if not values:
                continue
            words = spec["keys"][key]
            name, color = (words, j) if len(runs) == 1 else (run.name, i)
            drawn = [{"name": name, "key": key, "y": values, "color": color}]
            if spec.get("smooth") and len(values) >= 2 * MEAN_OF:
                drawn[0]["faint"] = True
                what = f"mean of {MEAN_OF} steps"
                label = what if len(runs) == 1 else f"{name}, {what}"
                drawn.append({"name": label, "key": "", "y": running_mean(values, MEAN_OF), "color": color})
            for line in drawn:
                line["x"], line["y"] = thin(steps, line["y"])
            chart["series"] += drawn
        if spec["id"] == "reward":
            chart["series"] += _accuracies(run, i, len(runs))
    return chart


def _each_reward(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The chart of the single rewards, where several were added up."""
    keys = dict.fromkeys(key for run in runs for key in sorted(run.keys("rollout/reward/")))
    note = "Mean of each over the rollouts of a step, before its weight."
    chart = {"id": "rewards", "section": "learning", "title": "Each reward", "note": note, "smooth": True}
    return [chart | {"keys": {key: key.removeprefix("rollout/reward/") for key in keys}}] if keys else []


def _accuracies(run: Run, i: int, num_runs: int) -> list[dict[str, Any]]:
    """Greedy accuracy of every held-out set."""
    found = []
    for j, name in enumerate(eval_sets(run)):
        label = f"held-out accuracy{'' if name == 'held_out' else f' ({name})'}"
        found.append(_points(run, f"eval/{name}/accuracy", label, (j + 1, i), num_runs))
    return found


def _passes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The chart of pass@k, where sampled answers were judged at all."""
    series = []
    for i, run in enumerate(runs):
        keys = [match for key in run.keys("eval/") if (match := re.fullmatch(r"eval/(.+)/pass_at_(\d+)", key))]
        for j, match in enumerate(sorted(keys, key=lambda match: (match[1], int(match[2])))):
            label = f"pass@{match[2]}{'' if match[1] == 'held_out' else f' ({match[1]})'}"
            series.append(_points(run, match[0], label, (j, i), len(runs)))
    note = "Share of held-out problems with a right answer among k sampled ones, with its 95 % interval."
    chart = {"id": "passes", "section": "learning", "title": "pass@k", "note": note, "kind": "lines", "series": series}
    return [chart] if series else []


def _points(run: Run, key: str, label: str, colors: tuple[int, int], num_runs: int) -> dict[str, Any]:
    """Points with intervals; one without an interval has bars of length 0. Colours for one run, and for several."""
    steps, values = run.series(key)
    ends = {end: dict(zip(*run.series(f"{key}_{end}"), strict=True)) for end in ("low", "high")}
    return {
        "name": label if num_runs == 1 else f"{run.name}, {label}",
        "key": key,
        "x": steps,
        "y": values,
        "below": [v - ends["low"].get(s, v) for s, v in zip(steps, values, strict=True)],
        "above": [ends["high"].get(s, v) - v for s, v in zip(steps, values, strict=True)],
        "color": colors[0] if num_runs == 1 else colors[1],
        "points": True,
    }


def _gradient_groups(run: Run, i: int, several: bool) -> dict[str, Any]:
    """Logarithm (base 10) of the norm of each group of layers; gaps where it was not measured or is 0."""
    keys = sorted(run.keys("train/grad_norm/"), key=_depth)
    bins = _bins(run.steps)
    return {
        "id": f"layers-{i}",
        "section": "gradients",
        "title": "Gradient norm by layer" + (f", {run.name}" if several else ""),
        "note": "Each row is a group of layers, from the embedding at the bottom to the last layer at the top."
        + _said("largest", bins),
        "kind": "heat",
        "x": [some[0]["step"] for some in bins] if keys else [],
        "y": [key.removeprefix("train/grad_norm/") for key in keys],
        "z": [[_largest(some, key) for some in bins] for key in keys],
        "keys": keys,
    }


def _stages(run: Run, i: int, several: bool) -> dict[str, Any]:
    """Seconds of each stage, stacked; `other` is what is left of the step."""
    bins = _bins([line for line in run.steps if is_number(line.get("perf/step_seconds"))])
    known = [f"perf/{stage}_seconds" for stage in STAGES]
    more = [k for k in run.keys("perf/") if k.endswith("_seconds") and k != "perf/step_seconds" and k not in known]
    keys = [key for key in [*known, *more] if any(run.series(key)[1])]
    columns = {key: [_mean(some, key) for some in bins] for key in keys}
    whole = [_mean(some, "perf/step_seconds") for some in bins]
    other = [max(0.0, total - sum(c[n] for c in columns.values())) for n, total in enumerate(whole)]
    series = [
        {"name": key[len("perf/") : -len("_seconds")], "key": key, "y": values, "color": n}
        for n, (key, values) in enumerate(columns.items())
    ]
    return {
        "id": f"stages-{i}",
        "section": "time",
        "title": "Time of a step by stage" + (f", {run.name}" if several else ""),
        "unit": "seconds",
        "note": "Stacked to the whole step. A stage that did not run in a step takes no time in it."
        + _said("mean", bins),
        "kind": "stack",
        "x": [some[0]["step"] for some in bins],
        "series": [*series, {"name": "other", "key": "", "y": other, "color": -1}] if bins else [],
    }


def _bins(lines: list[dict[str, Any]], most: int = 500) -> list[list[dict[str, Any]]]:
    """The lines in order, in at most so many groups of one size (the last may be smaller)."""
    size = max(1, math.ceil(len(lines) / most))
    return [lines[begin : begin + size] for begin in range(0, len(lines), size)]


def _said(what: str, bins: list[list[dict[str, Any]]]) -> str:
    return f" Each column is the {what} of {len(bins[0])} steps." if bins and len(bins[0]) > 1 else ""


def _largest(lines: list[dict[str, Any]], key: str) -> float | None:
    return max((line[key] for line in lines if is_number(line.get(key))), default=None)


def _mean(lines: list[dict[str, Any]], key: str) -> float:
    """Over all of the lines: one without the key took no time."""
    return math.fsum(line[key] for line in lines if is_number(line.get(key))) / len(lines)


def _depth(key: str) -> tuple[int, int, str]:
    """Embedding, layers by number, the rest."""
    name = key.rpartition("/")[2]
    number = name.rpartition(".")[2]
    if number.isdigit():
        return (1, int(number), name)
    return (0 if "embed" in name else 2, 0, name)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and those before it, `width` of them at most."""
    return [math.fsum(some) / len(some) for n in range(len(values)) if (some := values[max(0, n + 1 - width) : n + 1])]


def thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """At most about MAX_POINTS of the pairs: first and last, and of each bin the smallest and the largest value."""
    if len(values) <= MAX_POINTS:
        return steps, values
    kept = {0, len(values) - 1}
    size = math.ceil(len(values) / (MAX_POINTS // 2))
    for begin in range(0, len(values), size):
        inside = range(begin, min(begin + size, len(values)))
        kept |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return [steps[n] for n in sorted(kept)], [values[n] for n in sorted(kept)]
