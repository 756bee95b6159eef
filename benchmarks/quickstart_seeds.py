"""Does the quickstart learn on every seed? Makes a start, trains it, and prints accuracy before and after, by seed.

    python benchmarks/quickstart_seeds.py FOLDER [--model moe] [--seeds 0 1 2 3 4] [--steps 120] [--set KEY=VALUE ...]

The seeds are chosen beforehand; none is left out. Starts are supervised to 42 % and must lie between 30 and 60 %; the
accuracy is greedy, on 1,024 held-out problems that neither stage sees. What FOLDER holds already is not made again.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch

from onegrid.cli.train import run
from onegrid.rl.record import read_metrics
from onegrid.study.start import MODELS, make_start

CONFIGS = {"moe": "quickstart.toml", "dense": "quickstart_dense.toml"}
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, default="moe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=120, help="a third more than the quickstart takes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        start, run_dir = args.folder / f"start-{args.model}-{seed}", args.folder / f"run-{args.model}-{seed}"
        if not (start / "model.safetensors").exists():
            make_start(MODELS[args.model], start, seed=seed, target=0.42, max_steps=2000)
        overrides = [f"seed={seed}", f"model.checkpoint={start.resolve()}", "eval.num_problems=1024"]
        overrides += [f"loop.num_steps={args.steps}", f"learner.decay_steps={args.steps + 5}", *args.set]
        config = ROOT / "configs" / CONFIGS[args.model]
        run(config, overrides, run_dir=run_dir, num_steps=None, resume=True, dry_run=False)
        lines = read_metrics(run_dir)
        before, after = (lines[i]["eval/held_out/accuracy"] for i in (0, -1))
        seconds = sum(line.get("perf/step_seconds", 0.0) for line in lines)
        apart = max(line["mismatch/max_abs"] for line in lines[1:])
        results.append((seed, before, after, after - before, apart, seconds))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("seed  before  after   rise  mismatch  seconds")
    for seed, before, after, rise, apart, seconds in results:
        print(f"{seed:>4}  {before:.3f}   {after:.3f}  {rise:+.3f}  {apart:>8.3g}  {seconds:>7.0f}")


if __name__ == "__main__":
    main()
