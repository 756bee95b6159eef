"""Does GRPO raise the reward of a real model within minutes? SmolLM2-135M on reasoning-gym, in BF16 and in MXFP8.

    python benchmarks/smollm2_curve.py FOLDER --start STARTS/smollm2 [--seconds 150] [--device cuda] [--set K=V ...]

--start is what `onegrid import SmolLM2-135M-Instruct.Q4_1.gguf` wrote. The arms run side by side on one device, each in
a process of its own, until they get SIGINT after --seconds; then the curves are printed, means of five steps. FOLDER
keeps the run directories.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARMS = ("bf16", "mxfp8")
SETTINGS = ("loop.num_steps=100000", "loop.prompts_per_step=64", "loop.reference_every=0", "learner.lr=1e-5")
SETTINGS += ("learner.warmup_steps=5", "checkpoint.every=0", "eval.every=25", "eval.num_problems=256")
SPAN = 5


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    running = {}
    for arm in ARMS:
        command = [sys.executable, "-c", "from onegrid.cli import main; main()", "train"]
        command += [str(ROOT / "configs" / "smollm2.toml"), *SETTINGS, f"device={args.device}"]
        command += [f"model.checkpoint={args.start.resolve()}", f"recipe.preset={arm}", *args.set]
        log = (args.folder / f"{arm}.log").open("wb")
        folder = ["--run-dir", str(args.folder / arm)]
        running[arm] = subprocess.Popen([*command, *folder], stdout=log, stderr=log, cwd=ROOT)
    time.sleep(args.seconds)
    for process in running.values():
        process.send_signal(signal.SIGINT)
    for arm, process in running.items():
        print(f"{arm}: exit code {process.wait()}")
        show(args.folder / arm, args.folder / f"{arm}.log")


def show(folder: Path, log: Path) -> None:
    """The curve of one arm."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line for line in lines if "mismatch/max_abs" in line]
    if not steps:
        print(log.read_text(errors="replace")[-2000:])
        return
    held_out = [(i, line["eval/held_out/accuracy"]) for i, line in enumerate(lines) if "eval/held_out/accuracy" in line]
    print("  held-out accuracy by step: " + ", ".join(f"{step}: {accuracy:.3f}" for step, accuracy in held_out))
    rewards = [line["rollout/raw_reward"] for line in steps]
    means = [sum(rewards[i : i + SPAN]) / len(rewards[i : i + SPAN]) for i in range(0, len(rewards), SPAN)]
    print(f"  reward, means of {SPAN} steps: " + " ".join(f"{mean:.3f}" for mean in means))
    worst = max(line["mismatch/max_abs"] for line in steps)
    compared = sum(line.get("mismatch/tokens", 0.0) for line in steps)
    seconds = sum(line.get("perf/step_seconds", 0.0) for line in steps)
    print(f"  {len(steps)} steps in {seconds:.0f} s; largest mismatch of {compared:.0f} tokens: {worst}")
    perf = {key: sum(line[key] for line in steps) / len(steps) for key in steps[-1] if key.startswith("perf/")}
    print("  means: " + ", ".join(f"{key.removeprefix('perf/')} {value:.3g}" for key, value in perf.items()))


if __name__ == "__main__":
    main()
