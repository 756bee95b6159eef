"""Canonical tensors in the words of a checkpoint that vLLM loads: keys, tensors, and the configuration beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onegrid.convert.layouts import layout_for
from onegrid.convert.stored import parts_on_disk
from onegrid.errors import CapabilityError
from onegrid.formats import QuantTensor, dequantize
from onegrid.formats.casts import divide
from onegrid.formats.scales import global_encode
from onegrid.model.canonical import Canonical
from onegrid.recipe import Plan
from onegrid.recipe.dialects.schemes import METHODS, SCHEMES
from onegrid.recipe.plan import TensorPlan
from onegrid.sampler.vllm.config import Road


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What an engine must be told of a plan."""

    checkpoint: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine."""


def quantization_of(plan: Plan, road: Road) -> Quantization:
    """The plan in the engine's words. CapabilityError where the road cannot carry it.

    A plan that quantizes nothing is the same on every road. On "decoded", activations must not be quantized.
    """
    quantized = [t for t in plan.tensors.values() if t.sampler_weight is not None]
    if road == "decoded" or not quantized:
        wrong = [t for t in quantized if t.sampler_activation is not None]
        if wrong:
            raise CapabilityError(
                f"a plain engine does not quantize activations, and the plan asks for {wrong[0].sampler_activation} "
                f'at {wrong[0].name} and {len(wrong) - 1} more; say sampler_activation = "bf16" in the recipe, '
                "or take another road (sampler.vllm.road)"
            )
        return Quantization()
    if road == "online":
        told = dict(plan.to("vllm"))
        keep = {key: told[key] for key in ("quantization", "quantization_config") if told.get(key) is not None}
        return Quantization(arguments=keep)
    declared = {name: replace(t, sampler_activation=_input_for(road, t)) for name, t in plan.tensors.items()}
    told = replace(plan, tensors=declared).to(road)["quantization_config"]
    if told.get("quant_algo") == "MXFP8":  # vLLM 0.24 refuses ModelOpt's own name and reads the same layout by this one
        told = {"quant_method": "mxfp8", "ignored_layers": told["ignore"]} | (
            {"kv_cache_quant_algo": "FP8"} if "kv_cache_scheme" in told else {}
        )
    return Quantization(checkpoint={"quantization_config": told})


def _input_for(road: Road, planned: TensorPlan) -> str | None:
    """The input that the layout declares for a weight. Whether the engine's kernel quantizes it, `live.describe` says.

    ModelOpt's MXFP8 always declares MXFP8 inputs, also where the engine will read them in BF16 (Marlin, emulation).
    """
    weight, activation = planned.sampler_weight, planned.sampler_activation
    rows = [s for s in SCHEMES if s.method == METHODS[road] and weight in s.weights]
    if not rows or any(activation in row.activations for row in rows):
        return activation
    return rows[0].activations[0]


def tensors_for(name: str, canonical: Canonical, plan: Plan, road: Road, dtype: torch.dtype) -> dict[str, Tensor]:
    """Key in a checkpoint -> tensor. Values in the engine's dtype, except codes and scales, which are bytes.

    Roads "decoded" and "online" give grid values, exact in BF16 for formats without a global factor and rounded once
    from FP32 otherwise.
    """
    if isinstance(canonical, Tensor) or road in ("decoded", "online"):
        return {name: values_of(canonical, dtype)}
    stem = name.removesuffix(".weight")
    return {f"{stem}.{suffix}": x for suffix, x in parts_for(name, canonical, plan, road).items()}


def values_of(canonical: Canonical, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor: decoded to BF16 and, in an FP32 engine, widened; plain ones as they are."""
    if isinstance(canonical, Tensor):
        return canonical.to(dtype)
    return dequantize(canonical, torch.bfloat16).to(dtype)


def parts_for(name: str, canonical: QuantTensor, plan: Plan, road: Road) -> dict[str, Tensor]:
    """Suffix -> tensor of one quantized weight in the layout of a road."""
    planned = plan[name]
    row = layout_for(road, str(planned.sampler_weight), _input_for(road, planned))
    if canonical.amax is not None and canonical.factor is None:
        factor = divide(1.0, global_encode(canonical.amax, canonical.quantizer))
        canonical = replace(canonical, factor=factor)
    return parts_on_disk(canonical, row)


def checkpoint_items(
    tensors: Iterable[tuple[str, Canonical]], plan: Plan, road: Road, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every key and tensor of a version, as an engine's loader wants them, one weight in memory at a time."""
    for name, canonical in tensors:
        yield from tensors_for(name, canonical, plan, road, dtype).items()
