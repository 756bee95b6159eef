"""Where a checkpoint departs from a plan, tensor by tensor: in what is stored, and in what engines would make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onegrid.errors import RecipeError
from onegrid.recipe.dialects.foreign import Foreign
from onegrid.recipe.dialects.matchers import READERS
from onegrid.recipe.dialects.modules import Module, modules_of
from onegrid.recipe.plan import Plan

_LOOK_ALIKE = {"nvfp4_2d": "nvfp4", "mxfp8_2d": "mxfp8"}
"""Stored alike: tiles are written out to every row, so that a checkpoint cannot tell them."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One tensor that is not what the plan says."""

    tensor: str
    where: str
    """ "stored", "input", or the engine whose reading of the configuration is meant, such as "vllm-modelopt"."""
    planned: str
    found: str


def departures(
    plan: Plan, declared: Foreign | None, stored: Mapping[str, str | None], *, engines: Iterable[str] | None = None
) -> list[Departure]:
    """Every departure of a checkpoint from the sampler's side of a plan; empty if there is none.

    declared  what its configuration says; None if it says nothing
    stored    canonical tensor name -> quantizer its bytes are in, None for a plain tensor
    engines   whose matchers read the configuration (keys of MATCHERS); default: all that read this method
    """
    found: list[Departure] = []
    for name, planned in plan.tensors.items():
        wanted = _alike(planned.sampler_weight)
        if name not in stored:
            found.append(Departure(name, "stored", wanted, "missing"))
        elif _alike(stored[name]) != wanted:
            found.append(Departure(name, "stored", wanted, _alike(stored[name])))
    found += [Departure(name, "stored", "nothing", "extra") for name in stored if name not in plan.tensors]
    if declared is None:
        return found
    for engine in READERS[declared.method] if engines is None else engines:
        for module in modules_of(plan):
            found += _read(declared, engine, module)
    if declared.kv_cache != plan.kv_cache:
        found.append(Departure("key/value cache", "declared", plan.kv_cache, declared.kv_cache))
    return list(dict.fromkeys(found))


def _read(declared: Foreign, engine: str, module: Module) -> list[Departure]:
    tensors = [f"{shard}.weight" for shard in module.shards]
    wanted = _alike(module.weight)
    try:
        group = declared.read_by(engine, module)
    except RecipeError as error:
        return [Departure(name, engine, wanted, f"refused: {error}") for name in tensors]
    read = "bf16" if group is None else _alike(group.weight)
    if group is not None and module.weight in group.scheme.weights:
        read = wanted  # the bytes themselves decide between the quantizers of one scheme
    if read != wanted:
        return [Departure(name, engine, wanted, read) for name in tensors]
    if group is not None and module.activation not in group.activations:
        inputs = " or ".join(name or "bf16" for name in group.activations)
        return [Departure(name, "input", module.activation or "bf16", inputs) for name in tensors]
    return []


def _alike(quantizer: str | None) -> str:
    return "bf16" if quantizer is None else _LOOK_ALIKE.get(quantizer, quantizer)
