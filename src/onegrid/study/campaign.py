"""The fault campaign: every fault into the real loop, twice, and what came of it.

Once as a run is: the first check that objects stops it. Once with every check asked and none obeyed, the transaction's
own refusals included: that gives the matrix of faults and checks, and what the metrics of an unguarded run would show.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError, OnegridError, SyncError
from onegrid.guard.config import GuardConfig
from onegrid.guard.fault import PROBE, SELF, SENTINEL, Fault
from onegrid.guard.faults import FAULTS
from onegrid.guard.guard import guard_of
from onegrid.guard.injection import Bench, wrap
from onegrid.guard.verdict import FailedChecks, Verdict
from onegrid.rl.record import read_metrics
from onegrid.study.pairing import AT, device_name, is_wide, make_bench, run_loop
from onegrid.types import Piece

THOROUGH = GuardConfig(bucket_bytes=4096, linears_per_sync=1 << 10, probe_every=1, traces=True, replay_every=1)
"""Every check in full at every synchronization; in a run, some of their work takes turns."""
NUMERIC = (SELF, PROBE, SENTINEL)
"""Checks that see what a fault does to numbers, which depends on widths and prompts; all others see it, or nothing."""
SHOWN = ("mismatch/kl", "mismatch/k3", "mismatch/max_abs", "train/entropy", "rollout/raw_reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one fault."""

    fault: str
    condition: str
    caught_by: str
    """First check that objected, empty where none did."""
    at: str
    """ "sync 2" or "step 3"; the fault acts from version 2 on."""
    named_right: bool
    """Condition and, where canonical tensors are concerned, exactly these tensors."""
    seconds: float
    """From the commit, or the start of the step, to the verdict."""
    fires: tuple[str, ...]
    """Every check that objects when all are asked."""
    unguarded: dict[str, float] = field(default_factory=dict)
    """Metrics of the first step with the fault and without checks; empty where the run could not go on."""
    stopped_by: str = ""
    """What stopped the unguarded run, if something did."""
    changed: int = 0
    """How often the fault really changed something."""
    safe: bool = True
    """Whether a refusal left the version before serving, to the last byte, or nothing."""
    verdicts: tuple[Verdict, ...] = ()
    device: str = "cpu"
    """Where it ran: the name of the GPU, or "cpu"."""
    weights: str = "auto"
    """`sampler.weights` that it ran with."""
    wide: bool = False
    """Whether the model was wider than the one that rows of faults speak of: checks that are NUMERIC may see a fault
    there and not here, or here and not there."""

    @property
    def as_claimed(self) -> bool:
        """Whether the row of the fault is true."""
        fault = FAULTS[self.fault]
        caught = bool(self.caught_by) == bool(fault.fires) and self.changed > 0
        claimed, found = fault.fires, self.fires
        if self.wide:
            claimed, found = (tuple(check for check in fires if check not in NUMERIC) for fires in (claimed, found))
        return caught and found == claimed


def try_fault(fault: Fault, folder: Path, *, device: str = "cpu", weights: str = "auto") -> Outcome:
    """Both runs of one fault.

    weights  of the sampler: see `SamplerConfig`. CapabilityError for a fault that has no place there
    """
    run = guarded(fault, folder / "guarded", device=device, weights=weights)
    fires, unguarded, stopped_by = _observed(fault, folder / "observed", device, weights)
    if run["caught_by"] in ("transaction", "wake"):
        fires = (run["caught_by"], *fires)
    return Outcome(
        fault=fault.name,
        condition=fault.condition,
        fires=fires,
        unguarded=unguarded,
        stopped_by=stopped_by,
        device=device_name(device),
        weights=weights,
        wide=is_wide(weights, device),
        **run,
    )


def try_alone(fault: Fault, device: str = "cpu", weights: str = "auto") -> Outcome:
    """`try_fault` in a folder that goes away."""
    with TemporaryDirectory() as folder:
        return try_fault(fault, Path(folder), device=device, weights=weights)


def guarded(
    fault: Fault, folder: Path, *, off: tuple[str, ...] = (), device: str = "cpu", weights: str = "auto"
) -> dict[str, Any]:
    """A run as runs are, that the first objection stops: `caught_by`, `at`, `named_right` and more.

    off  checks that do not run
    """
    bench = make_bench(fault.model, fault.preset, device=device, weights=weights)
    guard = guard_of(dataclasses.replace(_thorough(device, weights), off=off), bench.learner, bench.sampler)
    clock: dict[str, Any] = {"begin": time.perf_counter(), "phase": "sync", "syncs": 0}
    fault.inject(bench)
    assert not bench.happened, f"{fault.name} has acted before its version"
    _note_time(bench, clock)
    found: dict[str, Any] = {"caught_by": "", "at": "", "named_right": not fault.fires, "seconds": 0.0}
    verdicts: tuple[Verdict, ...] = ()
    try:
        run_loop(bench, guard, folder)
    except FailedChecks as error:
        verdicts = error.verdicts
        right = any(_named_right(fault, bench, v) for v in verdicts)
        found |= {"caught_by": verdicts[0].check, "named_right": right}
    except SyncError as error:
        right = error.condition in (fault.reported or (fault.condition,))
        right &= not fault.names or set(error.tensors) == bench.touched
        found |= {"caught_by": "wake", "named_right": right}
    except NonFiniteError as error:
        right = not fault.names or any(name in str(error) for name in bench.touched)
        found |= {"caught_by": "finite", "named_right": right}
    if found["caught_by"]:
        found["seconds"] = time.perf_counter() - clock["begin"]
        found["at"] = f"{clock['phase']} {clock['syncs'] + (clock['phase'] == 'step')}"
    refused = bool(found["caught_by"]) and clock["phase"] == "sync"
    return found | {"changed": bench.happened, "safe": _safe(bench, refused), "verdicts": verdicts}


def _thorough(device: str, weights: str) -> GuardConfig:
    """With buckets that hold as many tensors of a wide model as of the other."""
    more = 16 if is_wide(weights, device) else 1
    return dataclasses.replace(THOROUGH, bucket_bytes=more * THOROUGH.bucket_bytes)


def _safe(bench: Bench, refused: bool) -> bool:
    """After a refusal the sampler serves the version before, every byte of it, or nothing."""
    intake = bench.intake
    if not refused or not intake.serving:
        return True
    try:
        return intake.version == AT - 1 and intake.digest(intake.digests) == intake.digests
    except SyncError:
        return False


def _named_right(fault: Fault, bench: Bench, verdict: Verdict) -> bool:
    if verdict.condition not in (fault.reported or (fault.condition,)) or fault.cause not in ("", verdict.cause):
        return False
    return not fault.names or set(verdict.tensors) == bench.touched


def _note_time(bench: Bench, clock: dict[str, Any]) -> None:
    """Notes when the last synchronization or rollout began."""

    def step(original: Callable[[], Any]) -> Any:
        clock.update(begin=time.perf_counter(), phase="sync", syncs=clock["syncs"] + 1)
        out = original()
        clock.update(begin=time.perf_counter())
        return out

    def generate(original: Callable[..., Any], *arguments: Any) -> Any:
        clock.update(begin=time.perf_counter(), phase="step")
        return original(*arguments)

    wrap(bench.learner, "step", step)
    wrap(bench.sampler, "generate", generate)


def _observed(fault: Fault, folder: Path, device: str, weights: str) -> tuple[tuple[str, ...], dict[str, float], str]:
    bench = make_bench(fault.model, fault.preset, device=device, weights=weights)
    guard = guard_of(_thorough(device, weights), bench.learner, bench.sampler)
    fires: list[str] = []

    def observe(verdicts: list[Verdict]) -> None:
        acted = bench.learner.version == AT or (fault.condition == "C7" and bench.happened > 0)
        if acted:
            fires.extend(v.check for v in verdicts if not v.passed and v.check not in fires)

    guard.observe = observe
    fault.inject(bench)
    silence(bench)
    stopped_by = ""
    try:
        run_loop(bench, guard, folder)
    except OnegridError as error:
        stopped_by = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        if isinstance(error, NonFiniteError) and "finite" in fault.fires:
            fires.append("finite")
        elif isinstance(error, NonFiniteError) and "sentinel" in fault.fires:
            fires.append("sentinel")
    lines = [line for line in read_metrics(folder) if line["step"] == AT + 1]
    shown = {key: float(lines[0][key]) for key in SHOWN if lines and key in lines[0]}
    return tuple(fires), shown, stopped_by


def silence(bench: Bench) -> list[str]:
    """Takes the transaction's own refusals away; returns a list that notes each one."""
    intake, refused = bench.intake, []

    def note(original: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return original(*arguments)
        except (SyncError, ConnectionError) as error:
            refused.append(str(error))
            intake._broken = ""
            return None

    def place_of(original: Callable[[Piece], Tensor], piece: Piece) -> Tensor:
        place = note(original, piece)
        return torch.empty_like(piece.data) if place is None else place  # what was refused goes nowhere

    def begin(original: Callable[..., Any], manifest: Any) -> None:
        if intake.version is not None and manifest.version <= intake.version:
            refused.append("version")
            intake.version = manifest.version - 1
        original(manifest)
        if not intake.keeps_staging:  # new memory holds anything: what never arrives is of the version before
            for name in intake.digests:
                for part, staged in intake.old(name).items():
                    staged.copy_(intake.store.parts(name)[part])

    def prove(original: Callable[..., Any], *arguments: Any) -> None:
        return None

    def verify(original: Callable[[], None]) -> None:
        try:
            original_prove(intake.digests, intake.digest(intake.digests))
        except SyncError as error:
            refused.append(str(error))

    original_prove = intake.prove
    wrap(intake, "prove", prove)
    wrap(intake, "verify", verify)
    wrap(intake, "check_complete", note)
    wrap(intake, "_moved_share", lambda original: 0.0)
    wrap(intake, "_check_entry", note)
    wrap(intake, "place_of", place_of)
    wrap(bench.sampler, "begin", begin)
    wrap(bench.sampler, "receive", note)
    return refused
