"""What the checks of every synchronization cost: a quickstart step with and without them, each check alone, the digest.

    python benchmarks/guard.py [CONFIG] [--steps N]

Prints processor seconds beside wall seconds: on a machine that others use only the former mean something.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from onegrid.config import load_config
from onegrid.formats import digest
from onegrid.guard import audit, byte_comparison, digests, freshness, probe, selfcheck, storage
from onegrid.guard.guard import CHECKS, GuardConfig, guard_of
from onegrid.learner import learner
from onegrid.rl.loop import train
from onegrid.rl.progress import Display
from onegrid.rl.record import Record
from onegrid.study.parts import build, design

PARTS = {
    "bytes": (byte_comparison, "compare_bytes"),
    "audit": (audit, "audit"),
    "digest": (digests, "compare_digests"),
    "storage": (storage, "compare_storage"),
    "selfcheck": (selfcheck, "selfcheck"),
    "probe": (probe, "probe"),
    "freshness": (freshness, "fresh_sampler"),
    "operands": (digests, "doubts"),
    "codes when made": (learner, "sums_of"),
}
"""Checks, and what is done for them beside: both sides' operands compared, digests of codes when they are made."""


def run_steps(path: Path, guard: GuardConfig, num_steps: int) -> tuple[float, float, dict[str, float]]:
    """Processor and wall seconds a step, and processor seconds of each check a synchronization."""
    config = load_config(path)
    config = replace(config, loop=replace(config.loop, num_steps=num_steps), eval=replace(config.eval, num_problems=1))
    plan = design(config, path.parent)
    parts = build(plan)
    spent: dict[str, list[float]] = defaultdict(list)
    originals = {name: getattr(*where) for name, where in PARTS.items()}
    for name, (module, function) in PARTS.items():
        setattr(module, function, _timed(originals[name], spent[name]))
    try:
        with TemporaryDirectory() as folder:
            processor, wall = time.process_time(), time.perf_counter()
            train(
                parts.task,
                parts.learner,
                parts.sampler,
                guard=guard_of(guard, parts.learner, parts.sampler),
                config=plan.config.loop,
                sampling=plan.config.sampling,
                seed=plan.config.seed,
                tokenizer=parts.tokenizer,
                record=Record(Path(folder), config=plan.config.record),
                display=Display(num_steps, console=Console(quiet=True)),
                dynamic=plan.config.dynamic,
                correction=plan.config.correction,
                evaluation=plan.config.eval,
                checkpoints=replace(plan.config.checkpoint, every=0),
                reference=parts.reference,
            )
            processor, wall = time.process_time() - processor, time.perf_counter() - wall
    finally:
        for name, (module, function) in PARTS.items():
            setattr(module, function, originals[name])
    each = {name: sum(seconds[1:]) / num_steps for name, seconds in spent.items()}
    return processor / num_steps, wall / num_steps, each


def digest_speed(num_bytes: int) -> float:
    """Bytes a processor second, of one large tensor."""
    x = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    digest(x)
    began = time.process_time()
    digest(x)
    return num_bytes / (time.process_time() - began)


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        out = function(*arguments, **named)
        spent.append(time.process_time() - began)
        return out

    return timed


def main() -> None:
    """Print one line a number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    processor, wall, each = run_steps(arguments.config, GuardConfig(), arguments.steps)
    bare, bare_wall, _ = run_steps(arguments.config, GuardConfig(off=CHECKS), arguments.steps)
    print(f"step with all checks      {processor:8.4f} s processor  {wall:8.4f} s wall")
    print(f"step with all of them off {bare:8.4f} s processor  {bare_wall:8.4f} s wall (the transaction stays)")
    for name, seconds in each.items():
        print(f"  {name:20} {1000 * seconds:8.2f} ms  {seconds / processor:7.2%} of a step")
    print(f"  together             {1000 * sum(each.values()):8.2f} ms  {sum(each.values()) / processor:7.2%}")
    print(f"digest {digest_speed(64 << 20) / 1e9:.3f} GB a processor second")


if __name__ == "__main__":
    main()
