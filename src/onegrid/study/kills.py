"""kill -9 in the middle of synchronizations, then resume: nothing mixed may ever serve, and the bytes must be the same.

Every run is a process of its own, forked before anything was computed; the victim says when a synchronization begins,
and dies a random part of its length later.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onegrid.errors import CheckpointError
from onegrid.guard.config import GuardConfig
from onegrid.guard.guard import guard_of
from onegrid.guard.injection import wrap
from onegrid.rl import checkpoint
from onegrid.study.pairing import STEPS, make_bench, run_loop


@dataclass(kw_only=True, slots=True)
class Kills:
    """What became of the runs that were killed."""

    num: int
    same: int = 0
    """Resumed runs that ended in the metrics and the weights of the uninterrupted one, with every check passed."""
    killed: int = 0
    """Victims that were still in a synchronization when they died."""
    different: list[str] = field(default_factory=list)


def run_kills(num: int, seed: int, folder: Path, *, on_done: Callable[[int], None] = lambda i: None) -> Kills:
    """`num` runs of three steps, each killed at a random moment of a random synchronization and resumed.

    folder  empty; gets the run directories
    Call it before this process has run a backward pass: autograd does not survive a fork.
    """
    draw, kills = random.Random(seed), Kills(num=num)
    make_bench()  # loads every library once, before the forks
    _wait(_fork(lambda say: _run(folder / "whole", say)))
    expected = _ending(folder / "whole")
    begun, ended = expected.pop("clock")
    for i in range(num):
        run = folder / f"run_{i}"
        at = draw.randrange(STEPS + 1)
        kills.killed += _kill(run, at, draw.random() * (ended - begun))
        _wait(_fork(lambda say, run=run: _run(run, say, resume=True)))  # type: ignore[misc]
        found = _ending(run)
        found.pop("clock")
        kills.same += found == expected
        if found != expected:
            kills.different.append(f"run {i}, killed in synchronization {at}")
        on_done(i)
    return kills


def _run(folder: Path, say: Callable[[str], None], *, resume: bool = False) -> None:
    torch.set_num_threads(1)
    bench = make_bench()
    guard = guard_of(GuardConfig(bucket_bytes=2048), bench.learner, bench.sampler)
    clock: list[float] = []

    def begin(original: Callable[..., None], manifest: object) -> None:
        say("begin\n")
        clock.append(time.perf_counter())
        original(manifest)

    def ended(original: Callable[..., object], *arguments: object, **named: object) -> object:
        out = original(*arguments, **named)
        clock.append(time.perf_counter())
        return out

    wrap(bench.sampler, "begin", begin)
    wrap(bench.sampler, "cached_versions", ended)  # asked by the last check
    run_loop(bench, guard, folder, every=1, resume=resume)
    (folder / "clock.json").write_text(json.dumps(clock[-2:]))


def _kill(folder: Path, at: int, delay_seconds: float) -> bool:
    """Kills a run `delay_seconds` into its synchronization number `at`. False if it was over before."""
    read, write = os.pipe()

    def say(text: str) -> None:
        os.write(write, text.encode())

    victim = _fork(lambda _: _run(folder, say))
    os.close(write)
    with os.fdopen(read) as events:
        for _ in range(at + 1):
            if not events.readline():
                raise CheckpointError(f"the run in {folder} ended before its synchronization {at}")
        time.sleep(delay_seconds)
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
    return os.WIFSIGNALED(status)


def _fork(work: Callable[[Callable[[str], None]], None]) -> int:
    """The process id of a child that does the work and exits with 0, or 1 where it raised."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(lambda text: None)
        code = 0
    finally:
        os._exit(code)


def _wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise CheckpointError(f"a run of the kill campaign ended with status {status}")


def _ending(folder: Path) -> dict[str, Any]:
    """Metrics without clock readings, digests of the last weights, incidents; and the clock of the last sync."""
    from onegrid.formats import digest

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = checkpoint.latest(folder)
    assert last is not None
    masters = checkpoint.load(last)["learner"]["masters"]
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines],
        "weights": {name: digest(x) for name, x in masters.items()},
        "incidents": (folder / "incidents.jsonl").read_text(),
        "clock": json.loads((folder / "clock.json").read_text()),
    }
