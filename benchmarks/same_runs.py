"""Do two runs, and one that was cut and resumed, write the same metrics on this device? And does the mismatch stay 0?

    python benchmarks/same_runs.py FOLDER [--steps 12] [--seconds 60] [--device cuda] [--set KEY=VALUE ...]

Five runs of the quickstart side by side: two alike; one that stops half way and resumes; and, until SIGINT after
--seconds, two long ones in MXFP8 (mixture of experts) and NVFP4 (dense), with the weights changing in every step.
Everything outside perf/ must be equal, byte for byte.
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
QUICKSTART, DENSE = ROOT / "configs" / "quickstart.toml", ROOT / "configs" / "quickstart_dense.toml"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    shared = [f"device={args.device}", *args.set]
    half = args.steps // 2
    short = [*shared, f"checkpoint.every={half}", "eval.num_problems=64"]
    long = [*shared, "checkpoint.every=0", "eval.every=0", "eval.num_problems=64", "learner.lr=2e-5"]
    long += ["learner.decay_steps=0", "loop.reference_every=0"]
    began = time.monotonic()
    running = {
        "first": start(QUICKSTART, args.folder / "first", args.steps, short),
        "second": start(QUICKSTART, args.folder / "second", args.steps, short),
        "cut": start(QUICKSTART, args.folder / "cut", half, short),
        "mxfp8": start(QUICKSTART, args.folder / "mxfp8", 100_000, long),
        "nvfp4": start(DENSE, args.folder / "nvfp4", 100_000, [*long, "recipe.preset=nvfp4_all"]),
    }
    finish("cut", running.pop("cut"))
    running["cut"] = start(QUICKSTART, args.folder / "cut", args.steps, short, "--resume")
    for name in ("first", "second", "cut"):
        finish(name, running.pop(name))
    time.sleep(max(0.0, args.seconds - (time.monotonic() - began)))
    for name, process in running.items():
        process.send_signal(signal.SIGINT)
        finish(name, process)
    first = metrics(args.folder / "first")
    for name in ("second", "cut"):
        other = metrics(args.folder / name)
        apart = sorted({key for a, b in zip(first, other, strict=False) for key in differing(a, b)})
        verdict = "equal" if not apart and len(first) == len(other) else f"{len(first)} and {len(other)} lines, {apart}"
        print(f"metrics of {name} against first, {args.steps} steps: {verdict}")
    for name in ("mxfp8", "nvfp4"):
        lines = metrics(args.folder / name)[1:]
        worst = max((line["mismatch/max_abs"] for line in lines), default=float("nan"))
        share = min((line["mismatch/share_equal"] for line in lines), default=float("nan"))
        rewards = [line["rollout/raw_reward"] for line in lines if "rollout/raw_reward" in line]
        print(
            f"{name}: {len(lines)} steps, largest mismatch of any token {worst}, smallest share of equal bits {share}, "
            f"reward {rewards[:1]} to {rewards[-1:]}"
        )


def start(config: Path, folder: Path, steps: int, settings: list[str], *more: str) -> subprocess.Popen[bytes]:
    """One run in a process of its own; its output goes to a file beside the folder."""
    command = [sys.executable, "-c", "from onegrid.cli import main; main()", "train", str(config), *settings]
    command += ["--steps", str(steps), "--run-dir", str(folder), *more]
    log = folder.with_suffix(".log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def finish(name: str, process: subprocess.Popen[bytes]) -> None:
    """Waits for a run; says so where it failed. 75 is a run that a signal has ended."""
    code = process.wait()
    if code not in (0, 75):
        print(f"{name} ended with exit code {code}")


def differing(one: dict[str, float], other: dict[str, float]) -> set[str]:
    """Keys whose values differ. A run that is cut evaluates where it ends, which the whole one does not do there."""
    return {key for key in one.keys() | other if one.get(key) != other.get(key)} - {
        key for key in one.keys() ^ other if key.startswith("eval/")
    }


def metrics(folder: Path) -> list[dict[str, float]]:
    """Lines of a run without clock readings."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        log = folder.with_suffix(".log")
        print(f"{folder.name} left no metrics: {log.read_text(errors='replace')[-1500:] if log.exists() else ''}")
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


if __name__ == "__main__":
    main()
