"""kill -9 a run at random moments, resume it each time, and compare its record with that of a run left alone.

    python scripts/kill_a_run.py [--kills 10] [--steps 30] [--seed 0] [--config FILE] [KEY=VALUE]...

Every life is a process of its own, forked before anything is computed, that runs `onegrid train --resume`. Exits with 1
unless every run ends in the same metrics file (clock readings aside), the same rollouts and the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import torch

from onegrid.cli.train import run
from onegrid.rl import checkpoint

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
SMALL = ["device=cpu", "loop.prompts_per_step=2", "loop.samples_per_prompt=4", "eval.num_problems=8"]
SMALL += ["sampler.max_slots=8", "checkpoint.every=2", "learner.decay_steps=0"]


def main() -> None:
    """Kill, resume, compare; say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=CONFIG)
    given = parser.parse_args()
    overrides = [*SMALL, *given.overrides]
    draw, kills, same, runs = random.Random(given.seed), 0, 0, 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        wait(live(given.config, overrides, folder / "whole", given.steps))
        longest = 3.0 * (time.perf_counter() - began) / (given.kills + 2)
        expected = ending(folder / "whole")
        while kills < given.kills:
            runs += 1
            found = folder / f"run_{runs}"
            while True:
                life = live(given.config, overrides, found, given.steps)
                if kills < given.kills and killed(life, draw.uniform(0.0, longest)):
                    kills += 1
                    continue
                if kills >= given.kills:
                    wait(life)
                break
            same += ending(found) == expected
    print(f"{kills} kills in {runs} runs of {given.steps} steps; {same} of {runs} end as the run that was left alone")
    if same != runs:
        raise SystemExit(1)


def live(config: Path, overrides: Sequence[str], folder: Path, num_steps: int) -> int:
    """The process id of a child that goes on with the run, or begins it, and exits with 0 when it has ended."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            run(config, overrides, run_dir=folder, num_steps=num_steps, resume=True, dry_run=False)
        code = 0
    finally:
        os._exit(code)


def killed(child: int, seconds: float) -> bool:
    """Kills a child after some seconds. False if it had ended before."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"a life ended by itself with code {os.waitstatus_to_exitcode(status)}")
    return os.WIFSIGNALED(status)


def wait(child: int) -> None:
    """Until the child has ended as it should."""
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise SystemExit(f"a life ended by itself with status {status}")


def ending(folder: Path) -> dict[str, Any]:
    """What a run leaves: metrics without clocks, rollouts, the state of its last checkpoint."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = checkpoint.latest(folder)
    assert last is not None
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines],
        "rollouts": {p.name: pq.read_table(p).to_pylist() for p in sorted((folder / "rollouts").iterdir())},
        "weights": bytes_of(checkpoint.load(last)),
        "incidents": (folder / "incidents.jsonl").read_text(),
    }


def bytes_of(tree: Any) -> Any:
    """A state with every tensor as its bytes."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(tree, dict):
        return {key: bytes_of(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [bytes_of(value) for value in tree]
    return tree


if __name__ == "__main__":
    main()
