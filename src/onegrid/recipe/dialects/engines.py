"""What engines are started with to quantize a BF16 checkpoint themselves, as the plan says.

The checkpoint stays in BF16; the engine quantizes while it loads, by its own rule. Where its scales are made by other
arithmetic than the plan's, codes can differ: `notes` says so, and a converted checkpoint is the way around it.
"""

from __future__ import annotations

from typing import Any

from onegrid.errors import RecipeError
from onegrid.recipe.dialects import checkpoint
from onegrid.recipe.dialects.matchers import vllm_compressed_tensors
from onegrid.recipe.dialects.modules import Module, excluded_names, modules_of
from onegrid.recipe.plan import Plan

Config = dict[str, Any]

_VLLM = {
    "fp8_tensor": "fp8_per_tensor",
    "fp8_128x128": "fp8_per_block",
    "fp8_128x128_fp32": "fp8_per_block",
    "fp8_row": "fp8_per_channel",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
}
"""Quantizer of the weight -> what vLLM calls it when it quantizes online."""
_VLLM_NOTES = {
    "fp8_128x128": "vLLM rounds block scales to powers of two only where its kernel asks for it",
    "fp8_128x128_fp32": "vLLM makes block scales as amax / 448; 1 ulp from the plan's for about a third of them",
    "fp8_tensor": "vLLM quantizes fused projections with one scale",
    "mxfp4": "vLLM rounds ties away from zero in MXFP4",
}


def vllm(plan: Plan) -> Config:
    """Arguments of vLLM's engine: `quantization`, `quantization_config` with what to leave alone, key/value cache.

    Raises RecipeError for what vLLM does not quantize online (NVFP4 beside experts): convert to modelopt or
    compressed-tensors instead.
    """
    names = {module.name: _vllm_shorthand(module) for module in modules_of(plan) if module.weight}
    arguments: Config = {"dtype": "bfloat16", "kv_cache_dtype": "fp8" if plan.kv_cache == "fp8" else "auto"}
    if not names:
        return arguments | {"quantization": None, "notes": []}
    excluded = excluded_names(plan)
    quantized = [module for module in modules_of(plan) if module.weight]
    by_kind = {kind: {names[m.name] for m in quantized if m.kind == kind} for kind in ("linear", "experts")}
    notes = [note for weight, note in _VLLM_NOTES.items() if any(m.weight == weight for m in quantized)]
    if any(m.kind == "head" for m in quantized):
        raise RecipeError("vLLM does not quantize lm_head online; keep it in BF16 or convert the checkpoint")
    if all(len(kinds) <= 1 for kinds in by_kind.values()):
        sections = {"linear": by_kind["linear"], "moe": by_kind["experts"]}
        chosen: Config = {key: next(iter(value)) for key, value in sections.items() if value}
        config = chosen | {"ignore": excluded}
        _check_vllm(plan, excluded, has_linear="linear" in chosen, has_moe="moe" in chosen)
    else:
        spelled = {m.name: [m.name] if m.kind == "experts" else m.shards for m in modules_of(plan)}
        config = {"targets": {part: name for module, name in names.items() for part in spelled[module]}}
    return arguments | {"quantization": "online", "quantization_config": config, "notes": notes}


def _vllm_shorthand(module: Module) -> str:
    if module.kind == "experts" and module.weight == "nvfp4" and module.activation == "nvfp4_row":
        return "nvfp4_per_token"
    if module.weight not in _VLLM:
        raise RecipeError(
            f"vLLM does not quantize {module.name} to {module.weight} while loading; "
            f"convert the checkpoint (layout modelopt or compressed-tensors)"
        )
    return _VLLM[module.weight]


def _check_vllm(plan: Plan, excluded: list[str], *, has_linear: bool, has_moe: bool) -> None:
    for module in modules_of(plan):
        covered = has_moe if module.kind == "experts" else has_linear and module.kind == "linear"
        whole = module.name in excluded if module.kind == "experts" else vllm_compressed_tensors(excluded, module)
        if (covered and not whole) != (module.weight is not None):
            raise RecipeError(f"vLLM would read {module.name} otherwise than the plan's {module.weight or 'bf16'}")


def sglang(plan: Plan) -> Config:
    """`quantization_config` for the checkpoint's config.json and the server's `--quantization`.

    MXFP8 and FP8 blocks are quantized while loading from BF16 too, by the same configuration.
    """
    weights = {m.weight for m in modules_of(plan) if m.weight}
    kv_cache = {"kv_cache_dtype": "fp8_e4m3" if plan.kv_cache == "fp8" else "auto"}
    if not weights:
        return kv_cache | {"quantization": None}
    if weights <= {"mxfp8", "mxfp8_2d"}:
        return kv_cache | {"quantization": "mxfp8", "quantization_config": checkpoint.mxfp8_config(plan)}
    if weights <= {"nvfp4", "nvfp4_2d"}:
        config = checkpoint.modelopt_config(plan)
        return kv_cache | {"quantization": "modelopt_fp4", "quantization_config": config}
    if any(weight.startswith("fp8_row") or weight == "mxfp4" for weight in weights):
        config = checkpoint.compressed_tensors_config(plan)
        return kv_cache | {"quantization": "compressed-tensors", "quantization_config": config}
    return kv_cache | {"quantization": "fp8", "quantization_config": checkpoint.fp8_config(plan)}


def transformers(plan: Plan) -> Config:
    """`quantization_config` for transformers: its own `fp8` where that can say it, compressed-tensors otherwise."""
    weights = {m.weight for m in modules_of(plan) if m.weight}
    if not weights:
        return {"quantization_config": None}
    if weights <= {"fp8_128x128", "fp8_128x128_fp32"}:
        config = checkpoint.fp8_config(plan)
        config.pop("fmt")
        config["scale_fmt"] = "float"  # how scales are stored, here: FP32 also where they are powers of two
        inputs = any(m.activation == "fp8_1x128" for m in modules_of(plan))
        notes = ["transformers quantizes inputs with FP32 scales, the plan with powers of two"] if inputs else []
        return {"quantization_config": config, "notes": notes}
    return {"quantization_config": checkpoint.compressed_tensors_config(plan)}
