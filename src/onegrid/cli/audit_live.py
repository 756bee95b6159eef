"""`onegrid audit --live`: an engine is started on a checkpoint, and what its modules hold is compared with a recipe."""

from __future__ import annotations

from pathlib import Path

from onegrid.cli.plan import read_recipe
from onegrid.convert.contents import pattern
from onegrid.convert.source import Source, open_source
from onegrid.errors import RecipeError, SyncError
from onegrid.model.canonical import Canonical, Snapshot
from onegrid.model.spec import ModelSpec
from onegrid.recipe import Plan, resolve
from onegrid.sampler.base import Live
from onegrid.sampler.vllm.adapter import VllmSampler
from onegrid.sampler.vllm.config import Road, VllmConfig

_ROADS: dict[str, Road] = {"fp8": "deepseek", "modelopt": "modelopt", "compressed-tensors": "compressed-tensors"}
LENGTH = 64
"""Positions of a sequence: the engine only has to start."""


def run(checkpoint: Path, recipe: str, *, emulate: bool = False, full: bool = False) -> bool:
    """Print every departure of the running engine; True if there is one.

    emulate  see `VllmConfig`
    full     a line for every tensor instead of one for all that differ in layer and expert alone
    Where formats are as planned, the bytes are compared too. CapabilityError where vLLM does not start with it.
    """
    source = open_source(checkpoint)
    plain = {key: x for key, x in source.config.items() if key not in ("quantization_config", "compression_config")}
    spec = ModelSpec.from_hf_config(plain)
    plan = resolve(read_recipe(recipe), source.config, source.shapes())
    sampler = VllmSampler(
        spec,
        source.config,
        plan,
        VllmConfig(road=_road(source), emulate=emulate, kv_cache_bytes=1 << 26, allow_unknown_kernel=True),
        max_len=min(LENGTH, spec.max_positions),
        max_slots=1,
        checkpoint=checkpoint,
    )
    try:
        found = departures(plan, sampler.describe())
        print(f"{checkpoint} in vLLM {sampler.engine_version}, started and asked, against {plan.recipe_name}:")
        lines: dict[str, int] = {}
        for name, told in found.items():
            line = f"{name if full else pattern(name)}: {told}"
            lines[line] = lines.get(line, 0) + 1
        for line, count in lines.items():
            print(f"  {line}{f' ({count} tensors)' if count > 1 else ''}")
        if found:
            print(f"{len(found)} of {len(plan.tensors)} tensors depart")
        if any("holds" in told for told in found.values()):
            return True
        return _content(source, plan, sampler) or bool(found)
    finally:
        sampler.close()
        source.close()


def departures(plan: Plan, live: dict[str, Live]) -> dict[str, str]:
    """Tensor -> how the engine differs from the sampler's side of a plan; empty if nowhere."""
    found: dict[str, str] = {}
    for name, planned in plan.tensors.items():
        if name not in live:
            found[name] = f"planned {planned.sampler_weight or 'bf16'}, and the engine holds nothing"
            continue
        entry = live[name]
        weight, inputs = planned.sampler_weight or "bf16", planned.sampler_activation or "bf16"
        if entry.format != weight:
            found[name] = f"planned {weight}, the engine holds {entry.format} ({entry.kernel})"
        elif planned.sampler_weight and entry.activation != inputs:
            told = entry.activation or "unknown to this adapter"
            found[name] = f"planned inputs {inputs}, those of {entry.kernel} are {told}"
    return found


def _content(source: Source, plan: Plan, sampler: VllmSampler) -> bool:
    """Whether the engine holds other bytes than the checkpoint; prints it."""
    tensors: dict[str, Canonical] = {name: source.read(name) for name in plan.tensors}
    try:
        sampler.adopt_loaded(Snapshot(version=0, plan_digest=plan.digest, tensors=tensors))
    except SyncError as error:
        print(f"  {error}")
        return True
    print(f"all {len(plan.tensors)} tensors hold the checkpoint's bytes, as planned")
    return False


def _road(source: Source) -> Road:
    if source.declared is None:
        return "decoded"
    if source.declared.method not in _ROADS:
        raise RecipeError(f"vLLM does not load the layout {source.declared.method!r}; layouts: {', '.join(_ROADS)}")
    return _ROADS[source.declared.method]
