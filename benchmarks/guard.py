"""What the checks of every synchronization cost: a quickstart step with and without them, each check alone, the digest.

    python benchmarks/guard.py [CONFIG] [--steps N]
    python benchmarks/guard.py --shape qwen3-8b --layers 4 --device cuda [--sequences N] [--prompt N] [--new N]

Steps with and without checks in turns, in wall seconds, which mean something on a quiet machine only; each check in
processor seconds. The start of a run is in neither. A shape has random weights, and what stands beside its checks is
one whole step: rollouts of N sequences, the learner's update on them, and the synchronization itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from onegrid.config import load_config
from onegrid.formats import digest
from onegrid.guard import audit, byte_comparison, digests, freshness, probe, selfcheck, storage
from onegrid.guard.config import CHECKS, GuardConfig
from onegrid.guard.guard import Guard, guard_of, guard_sync
from onegrid.learner import learner
from onegrid.learner.config import LearnerConfig
from onegrid.ops.pins import pin
from onegrid.rl.progress import Display
from onegrid.rl.record import Record, read_metrics
from onegrid.study import bench
from onegrid.study.parts import build, design, train_parts

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

TURNS = GuardConfig().probe_every
"""Synchronizations that are timed, so that what rests has its turn once."""


def run_steps(path: Path, guard: GuardConfig, num_steps: int) -> tuple[list[float], dict[str, float]]:
    """Wall seconds of every step, processor seconds of each check a synchronization; the start is in neither."""
    config = load_config(path)
    config = replace(config, loop=replace(config.loop, num_steps=num_steps), eval=replace(config.eval, num_problems=1))
    plan = design(config, path.parent)
    parts = build(plan)
    spent: dict[str, list[float]] = defaultdict(list)
    with timed_parts(spent, _timed), TemporaryDirectory() as folder:
        train_parts(
            parts,
            replace(plan.config, checkpoint=replace(plan.config.checkpoint, every=0)),
            guard=guard_of(guard, parts.learner, parts.sampler),
            record=Record(Path(folder), config=plan.config.record),
            display=Display(num_steps, console=Console(quiet=True)),
        )
        steps = [float(str(line["perf/step_seconds"])) for line in read_metrics(Path(folder))[1:]]
    each = {name: sum(seconds[1:]) / num_steps for name, seconds in spent.items()}
    return steps, each


def at_shape(shape: str, *, layers: int, sequences: int, prompt: int, new: int, device: torch.device) -> None:
    """Print the seconds of every check, and of a step without them: rollouts, update and synchronization."""
    spec, plan = bench.spec_and_plan(shape, "mxfp8", layers)
    learner_ = learner.Learner(
        spec, plan, bench.random_tensors(spec, device), LearnerConfig(max_tokens=8192), device=device
    )
    engine = bench.engine(shape, "mxfp8", device, slots=sequences, max_len=prompt + new, layers=layers)
    wanted = bench.requests(sequences, prompt=prompt, new=new, vocab=spec.vocab_size)

    def sync(guard: Guard) -> None:
        learner_.version += 1
        learner_._quantize()
        guard_sync(learner_, engine, guard)

    spent: dict[str, list[float]] = defaultdict(list)
    with timed_parts(spent, lambda function, into: _timed_wall(function, into, device)):
        guard = guard_of(GuardConfig(), learner_, engine)
        for index in range(2 + TURNS):
            if index == 2:
                for seconds in spent.values():
                    seconds.clear()
            sync(guard)
        each = {name: sum(seconds) / TURNS for name, seconds in spent.items()}
    bare = guard_of(GuardConfig(off=CHECKS), learner_, engine)
    moved = bench.seconds(lambda: sync(bare), device, repeats=2, warmups=1)
    rollouts = bench.seconds(lambda: engine.generate(wanted), device, repeats=1, warmups=1)
    batch = bench.batch_of(engine.generate(wanted))

    def update() -> None:
        learner_.forward_backward(batch)
        learner_.step()

    updated = bench.seconds(update, device, repeats=1, warmups=1)
    total = sum(each.values()) + moved + updated + rollouts
    print(f"{shape}, {layers} layers, {sequences} sequences of {prompt} and {new} tokens: a step of {total:.2f} s")
    for name, seconds in (("rollouts", rollouts), ("update", updated), ("synchronization", moved)):
        print(f"  {name:20} {1000 * seconds:9.1f} ms without checks")
    for name, seconds in each.items():
        print(f"  {name:20} {1000 * seconds:9.2f} ms  {seconds / total:7.2%} of the step")
    print(f"  together             {1000 * sum(each.values()):9.2f} ms  {sum(each.values()) / total:7.2%}")


def digest_speed(num_bytes: int, device: torch.device) -> float:
    """Bytes a second of one large tensor: processor seconds on a CPU, else the device's."""
    x = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    digest(x)
    if device.type != "cpu":
        return num_bytes / bench.seconds(lambda: digest(x), device)
    began = time.process_time()
    digest(x)
    return num_bytes / (time.process_time() - began)


@contextmanager
def timed_parts(
    spent: dict[str, list[float]], wrap: Callable[[Callable[..., Any], list[float]], Callable[..., Any]]
) -> Iterator[None]:
    """Every part notes its seconds while the block runs."""
    originals = {name: getattr(*where) for name, where in PARTS.items()}
    for name, (module, function) in PARTS.items():
        setattr(module, function, wrap(originals[name], spent[name]))
    try:
        yield
    finally:
        for name, (module, function) in PARTS.items():
            setattr(module, function, originals[name])


def _timed_wall(function: Callable[..., Any], spent: list[float], device: torch.device) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        wait(device)
        began = time.perf_counter()
        out = function(*arguments, **named)
        wait(device)
        spent.append(time.perf_counter() - began)
        return out

    return timed


def wait(device: torch.device) -> None:
    """For what a GPU was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    parser.add_argument("--shape", choices=list(bench.SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=384)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    device = torch.device(arguments.device)
    pin(device)
    print(f"digest {digest_speed((64 if device.type == 'cpu' else 4096) << 20, device) / 1e9:.3f} GB a second")
    if arguments.shape:
        at_shape(
            arguments.shape,
            layers=arguments.layers,
            sequences=arguments.sequences,
            prompt=arguments.prompt,
            new=arguments.new,
            device=device,
        )
        return
    run_steps(arguments.config, GuardConfig(), 1)  # what a process does once
    on: list[float] = []
    off: list[float] = []
    for _ in range(2):  # in turns; step n is the same work in every run
        seconds, each = run_steps(arguments.config, GuardConfig(), arguments.steps)
        on += seconds
        off += run_steps(arguments.config, GuardConfig(off=CHECKS), arguments.steps)[0]
    step = statistics.median(on)
    paired = statistics.median(one / other for one, other in zip(on, off, strict=True))
    print(f"step with all checks      {step:8.4f} s")
    print(f"step with all of them off {statistics.median(off):8.4f} s (the transaction stays)")
    print(f"ratio, median of {len(on)} pairs of steps: {paired:.4f}")
    for name, spent in each.items():
        print(f"  {name:20} {1000 * spent:8.2f} ms  {spent / step:7.2%} of a step")
    print(f"  together             {1000 * sum(each.values()):8.2f} ms  {sum(each.values()) / step:7.2%}")


if __name__ == "__main__":
    main()
