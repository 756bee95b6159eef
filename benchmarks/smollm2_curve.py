"""Does GRPO raise the reward of a real model within minutes? SmolLM2-135M on reasoning-gym, in BF16 and in MXFP8.

    python benchmarks/smollm2_curve.py FOLDER --start STARTS/smollm2 --dry-run
    python benchmarks/smollm2_curve.py FOLDER --start STARTS/smollm2 [--seconds 100] [--device cuda] [--json FILE]

--start is what `onegrid import SmolLM2-135M-Instruct.Q4_1.gguf` wrote. --dry-run needs no GPU: it imports what a run
imports, resolves both arms and draws their problems, so that nothing is missing when device time is spent. The arms run
side by side on one device, each in a process of its own. --seconds counts from where both have evaluated their start;
then they get SIGINT, and the curves are printed. FOLDER keeps the run directories; one that has such runs is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ARMS = ("bf16", "mxfp8")
SETTINGS = (
    "task.settings={min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1}",
    "loop.num_steps=100000",
    "loop.prompts_per_step=64",
    "loop.reference_every=0",
    "learner.lr=1e-5",
    "learner.warmup_steps=5",
    "sampler.max_slots=512",
    "checkpoint.every=0",
    "record.rollouts_every=10",
    "eval.every=10",
    "eval.num_problems=256",
)
SPAN = 5
"""Steps of one mean in the printed curve."""
CLOSING = 90.0
"""Seconds for the step at hand and a checkpoint of 1.6 GB after SIGINT, before a process is killed."""


def main() -> int:
    """Command line; the exit code is 1 if an arm has no step to show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="of training, after both starts (100)")
    parser.add_argument("--start-seconds", type=float, default=120.0, help="the most that both starts may take (120)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="replaces settings of both arms")
    parser.add_argument("--json", type=Path, help="where the curves go, for machines")
    parser.add_argument("--dry-run", action="store_true", help="check both arms, train nothing")
    args = parser.parse_args()
    settings = [*SETTINGS, f"model.checkpoint={args.start.resolve()}", f"device={args.device}", *args.set]
    if args.dry_run:
        return check([*settings, "device=cpu"])
    taken = [str(args.folder / arm) for arm in ARMS if (args.folder / arm).exists()]
    if taken:
        parser.error(f"{', '.join(taken)} exist already; name another FOLDER")
    args.folder.mkdir(parents=True, exist_ok=True)
    started = run(args.folder, settings, seconds=args.seconds, start_seconds=args.start_seconds)
    found = {arm: curve(args.folder / arm) for arm in ARMS}
    for arm in ARMS:
        print(f"{arm}: began after {started[arm]:.0f} s" if arm in started else f"{arm}: did not begin")
        show(found[arm], args.folder / f"{arm}.log")
    if args.json:
        made = {"command": sys.argv, "settings": settings, "seconds": args.seconds, "start_seconds": started}
        write(args.json, {**made, "versions": versions(args.folder), "arms": found})
    return 0 if all(found.values()) else 1


def command(arm: str, settings: list[str]) -> list[str]:
    """`onegrid train` of one arm."""
    onegrid = [sys.executable, "-c", "from onegrid.cli import main; main()"]
    return [*onegrid, "train", str(ROOT / "configs" / "smollm2.toml"), *settings, f"recipe.preset={arm}"]


def check(settings: list[str]) -> int:
    """Both arms by `onegrid train --dry-run`; the first exit code that is not 0, or 0."""
    for arm in ARMS:
        done = subprocess.run([*command(arm, settings), "--dry-run"], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            print(f"{arm}: {done.stderr[-2000:]}")
            return done.returncode
        print(f"{arm}:\n{done.stdout[done.stdout.index('memory estimate') :]}")
    return 0


def run(folder: Path, settings: list[str], *, seconds: float, start_seconds: float) -> dict[str, float]:
    """Train all arms side by side; seconds from launch to the first line of metrics, for those that got there."""
    running, started, began = {}, {}, time.monotonic()
    for arm in ARMS:
        with (folder / f"{arm}.log").open("wb") as log:
            line = [*command(arm, settings), "--run-dir", str((folder / arm).resolve())]
            running[arm] = subprocess.Popen(line, stdout=log, stderr=log, cwd=ROOT)
    try:
        until = began + start_seconds
        while time.monotonic() < until and any(process.poll() is None for process in running.values()):
            for arm in running.keys() - started.keys():
                path = folder / arm / "metrics.jsonl"
                if path.exists() and path.stat().st_size:
                    started[arm] = time.monotonic() - began
                    if len(started) == len(ARMS):
                        until = time.monotonic() + seconds
            time.sleep(0.5)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for arm, process in running.items():
            try:
                print(f"{arm}: exit code {process.wait(CLOSING)}", flush=True)
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"{arm}: killed, {CLOSING:.0f} s after SIGINT", flush=True)
    return started


def curve(folder: Path) -> dict[str, Any]:
    """The curves of one arm, from its run directory; empty if it made no step."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line for line in lines if "mismatch/max_abs" in line]
    if not steps:
        return {}
    held_out = [line for line in lines if "eval/held_out/accuracy" in line]
    seconds = sum(line["perf/step_seconds"] for line in steps)
    tokens = sum(line["rollout/num"] * line["rollout/response_length"] for line in steps)
    stages = [key for key in steps[-1] if key.startswith("perf/") and key.endswith("_seconds")]
    return {
        "steps": len(steps),
        "seconds": seconds,
        "reward": [line["rollout/raw_reward"] for line in steps],
        "held_out": [
            {"step": line["step"]} | {key: line[f"eval/held_out/{key}"] for key in ("accuracy", *_bounds(line))}
            for line in held_out
        ],
        "held_out_problems": held_out[0]["eval/held_out/problems"] if held_out else 0,
        "mismatch_max_abs": max(line["mismatch/max_abs"] for line in steps),
        "mismatch_share_equal": min(line["mismatch/share_equal"] for line in steps),
        "mismatch_tokens": sum(line["mismatch/tokens"] for line in steps),
        "checks_not_passed": sum(line[key] != 1 for line in steps for key in line if key.startswith("guard/")),
        "learned_tokens_per_second": tokens / seconds,
        "rollout_tokens_per_second": statistics.median(line["perf/rollout_tokens_per_second"] for line in steps),
        "step_seconds": statistics.median(line["perf/step_seconds"] for line in steps),
        "stage_seconds": {
            key.removeprefix("perf/").removesuffix("_seconds"): sum(line.get(key, 0.0) for line in steps) / len(steps)
            for key in stages
        },
    }


def _bounds(line: dict[str, Any]) -> list[str]:
    return [key for key in ("accuracy_low", "accuracy_high") if f"eval/held_out/{key}" in line]


def show(found: dict[str, Any], log: Path) -> None:
    """One arm in words, or the end of its log."""
    if not found:
        print(log.read_text(errors="replace")[-2000:])
        return
    held_out = ", ".join(f"{point['step']}: {point['accuracy']:.3f}" for point in found["held_out"])
    print(f"  held-out accuracy by step ({found['held_out_problems']:.0f} problems, greedy): {held_out}")
    reward = found["reward"]
    means = [statistics.fmean(reward[i : i + SPAN]) for i in range(0, len(reward), SPAN)]
    print(f"  reward, means of {SPAN} steps: " + " ".join(f"{mean:.3f}" for mean in means))
    print(
        f"  {found['steps']} steps in {found['seconds']:.0f} s; mismatch: largest of {found['mismatch_tokens']:.0f} "
        f"tokens {found['mismatch_max_abs']:.3g}, equal bits {found['mismatch_share_equal']:.2%}; "
        f"checks not passed: {found['checks_not_passed']}"
    )
    print(
        f"  tokens/s: rollout {found['rollout_tokens_per_second']:.0f} (median), learned "
        f"{found['learned_tokens_per_second']:.0f} of all time; step {found['step_seconds']:.2f} s (median); means: "
        + ", ".join(f"{key} {value:.2f}" for key, value in found["stage_seconds"].items())
    )


def versions(folder: Path) -> dict[str, Any]:
    """Device and libraries, as the first arm that began wrote them."""
    paths = [folder / arm / "versions.json" for arm in ARMS]
    return next((json.loads(path.read_text()) for path in paths if path.exists()), {})


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON, there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
