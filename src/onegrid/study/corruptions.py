"""Corruptions that no list names: drawn by seed, one a synchronization; and synchronizations without any.

A byte, a tensor or a bucket, on the wire, in the sampler's codes, in its operands, in the learner's codes or operands.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import SyncError
from onegrid.guard.config import GuardConfig
from onegrid.guard.guard import guard_of, guard_sync
from onegrid.guard.inject_state import tensors
from onegrid.guard.injection import Bench, wrap
from onegrid.guard.verdict import FailedChecks
from onegrid.model.canonical import raw_bytes
from onegrid.model.stacks import is_stack
from onegrid.study.pairing import device_name, make_bench
from onegrid.types import Bucket

KINDS = ("wire byte", "bucket", "code byte", "tensor", "operand byte", "learner code", "learner operand")
BUCKET_BYTES = 2048


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a row of synchronizations came to."""

    num: int
    seed: int
    device: str = "cpu"
    """See `Outcome`, `weights` too."""
    weights: str = "auto"
    alarms: int = 0
    """Synchronizations that were refused."""
    named_right: int = 0
    """Those where exactly the corrupted tensors were named."""
    unsafe: int = 0
    """Refusals after which not every byte of the version before was serving."""
    seconds: float = 0.0
    by_check: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One for each corruption, with the keys of a campaign's rows."""


class Corruptor:
    """Changes one thing in the synchronization that comes."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.random = bench, random.Random(seed)
        self.kind = ""
        self.bucket = -1
        self.received = 0
        wrap(bench.sampler, "receive", self._receive)
        wrap(bench.weights, "derive", self._derive)

    def arm(self, num_buckets: int) -> None:
        """Draws what goes wrong next; learner's faults happen at once."""
        self.bench.touched, self.bench.happened = set(), 0
        self.kind = self.random.choice([k for k in KINDS if k != "operand byte" or self.bench.weights.keeps_operands])
        self.bucket, self.received = self.random.randrange(num_buckets), 0
        live = self.bench.learner.live
        if self.kind == "learner code":
            name = self.random.choice(live.names())
            self._flip(self.random.choice(list(live.parts(name).values())), name)
        elif self.kind == "learner operand":
            self._flip_operand(live.operands, live.keys)

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self.kind = ""

    def _receive(self, original: Callable[[Bucket], None], bucket: Bucket) -> None:
        at, self.received = self.received, self.received + 1
        if at != self.bucket or self.kind not in ("wire byte", "bucket"):
            return original(bucket)
        *rest, last = bucket.pieces
        how = self.random.choice(("lost", "twice", "cut"))
        if self.kind == "wire byte":
            data = last.data.clone()
            self._flip(data, last.name)
            changed = [dataclasses.replace(bucket, pieces=(*rest, dataclasses.replace(last, data=data)))]
        elif how == "cut":
            self.bench.touch([last.name])
            half = dataclasses.replace(last, data=last.data[:-1])
            changed = [dataclasses.replace(bucket, pieces=(*rest, half))]
        else:
            self.bench.touch({bucket.pieces[0].name} if how == "twice" else {p.name for p in bucket.pieces})
            changed = [bucket, bucket] if how == "twice" else []
        for arriving in changed:
            original(arriving)
        return None

    def _derive(self, original: Callable[..., None], *arguments: Any) -> None:
        weights, armed = self.bench.weights, not self.bench.intake.refused
        if armed and self.kind == "code byte":
            name = self.random.choice(weights.names())
            self._flip(self.random.choice(list(weights.parts(name).values())), name)
        elif armed and self.kind == "tensor":
            self._replace(self.random.choice(weights.names()))
        original(*arguments)
        if armed and self.kind == "operand byte":
            self._flip_operand(weights.operands, weights.keys)

    def _flip(self, x: Tensor, name: str) -> None:
        """One bit of one byte of a part."""
        raw = raw_bytes(x)
        raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
        self.bench.touch([name])

    def _flip_operand(self, operands: Any, keys: Any) -> None:
        key = self.random.choice(list(operands))
        x = self.random.choice(tensors(operands[key]))
        index = self.random.randrange(len(keys[key]))
        self._flip(x[index] if is_stack(key) else x, keys[key][index])

    def _replace(self, name: str) -> None:
        """A whole tensor: of the version before, zeros, ones, noise, or its own bytes in another order."""
        parts = self.bench.weights.parts(name)
        how = self.random.choice(("old", "zeros", "ones", "noise", "rolled"))
        before = {part: x.clone() for part, x in parts.items()}
        for part, x in parts.items():
            raw = raw_bytes(x)
            if how == "old":
                x.copy_(self.bench.intake.old(name)[part])
            elif how == "noise":
                generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
                raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
            else:
                raw.copy_(raw.roll(1) if how == "rolled" else torch.full_like(raw, 0 if how == "zeros" else 255))
        if any(bool((raw_bytes(x) != raw_bytes(before[part])).any()) for part, x in parts.items()):
            self.bench.touch([name])


def run_corruptions(
    num: int, seed: int, *, device: str = "cpu", weights: str = "auto", on_done: Callable[[int], None] = lambda i: None
) -> Tally:
    """`num` synchronizations, each with one corruption, every one after an update that moves all weights.

    weights  of the sampler: see `SamplerConfig`. Where it keeps no operands, none is corrupted
    """
    bench = make_bench(device=device, weights=weights)
    tally = Tally(num=num, seed=seed, device=device_name(device), weights=weights)
    guard = guard_of(GuardConfig(bucket_bytes=BUCKET_BYTES), bench.learner, bench.sampler)
    num_buckets = guard_sync(bench.learner, bench.sampler, guard).sync.num_buckets
    corruptor = Corruptor(bench, seed)
    began = time.perf_counter()
    for i in range(num):
        while True:
            update(bench, seed + i)
            serving = bench.sampler.version
            corruptor.arm(num_buckets)
            start = time.perf_counter()
            row: dict[str, Any] = {
                "fault": f"random_{seed}_{i}",
                "what": corruptor.kind,
                "at": f"sync {bench.learner.version}",
                "device": tally.device,
                "weights": weights,
            }
            try:
                guard_sync(bench.learner, bench.sampler, guard)
                if not bench.happened:  # the draw changed no byte: make another
                    continue
                tally.missed.append(f"{i}: {corruptor.kind} in {sorted(bench.touched)}")
                row |= {"condition": "", "caught_by": "", "named_right": False}
            except FailedChecks as error:
                first = error.verdicts[0]
                right = any(set(v.tensors) == bench.touched for v in error.verdicts)
                row |= {"condition": first.condition, "caught_by": first.check, "named_right": right}
                tally.alarms += 1
                tally.by_check[first.check] += 1
                tally.by_kind[corruptor.kind] += 1
                tally.named_right += right
                tally.unsafe += not whole(bench, serving)
            tally.rows.append(row | {"seconds": time.perf_counter() - start})
            break
        corruptor.disarm()
        on_done(i)
    tally.seconds = time.perf_counter() - began
    return tally


def run_healthy(
    num: int, seed: int, *, device: str = "cpu", weights: str = "auto", on_done: Callable[[int], None] = lambda i: None
) -> Tally:
    """`num` synchronizations of updates that move all weights, with nothing wrong: every alarm is a false one."""
    bench = make_bench(device=device, weights=weights)
    tally = Tally(num=num, seed=seed, device=device_name(device), weights=weights)
    guard = guard_of(GuardConfig(bucket_bytes=BUCKET_BYTES), bench.learner, bench.sampler)
    began = time.perf_counter()
    for i in range(num):
        update(bench, seed + i)
        try:
            guard_sync(bench.learner, bench.sampler, guard)
        except FailedChecks as error:
            tally.alarms += 1
            tally.missed.append(f"{i}: {error.verdicts[0].check}: {error.verdicts[0].found}")
        on_done(i)
    tally.seconds = time.perf_counter() - began
    return tally


def update(bench: Bench, seed: int) -> None:
    """One optimizer step on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for master in bench.learner.masters.values():
        master.grad = torch.randn(master.shape, generator=generator).to(master.device)
    bench.learner.step()


def whole(bench: Bench, version: int | None) -> bool:
    """Whether `version` is serving, every byte and operand of it."""
    intake = bench.intake
    try:
        return bench.sampler.version == version and intake.serving and intake.digest(intake.digests) == intake.digests
    except SyncError:
        return False
