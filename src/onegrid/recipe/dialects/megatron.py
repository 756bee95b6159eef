"""The learner's side of a plan for Transformer Engine, and for Megatron, which chooses a recipe of it per module.

Megatron names modules otherwise than Hugging Face and matches them with shell patterns, first match wins. A pattern
leaves out the layer number where all layers agree, since numbers are counted per pipeline stage.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from onegrid.errors import RecipeError
from onegrid.recipe.kinds import layer_of
from onegrid.recipe.plan import Plan, TensorPlan

Config = dict[str, Any]

_MODULES = {
    "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.k_proj": "self_attention.linear_qkv",
    "self_attn.v_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.experts.gate_proj": "mlp.experts.linear_fc1",
    "mlp.experts.up_proj": "mlp.experts.linear_fc1",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2",
    "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}
"""Module inside a layer, expert numbers left out, in Hugging Face's words -> in Megatron's."""

_DECISION = ("weight", "activation", "gradient", "backward")


def te(plan: Plan) -> Config:
    """Recipes of Transformer Engine by name, environment, and Megatron's arguments and precision file.

    Raises RecipeError for what Transformer Engine has no recipe for, for switches that would have to differ between
    modules, and for a module that Megatron's patterns cannot tell from another.
    """
    modules = _modules(plan)
    recipes: dict[str, Config] = {}
    chosen: dict[str, str] = {}
    environment: dict[str, str] = {}
    for name, t in modules.items():
        if t.weight is None:
            chosen[name] = "bf16"
            continue
        key, recipe, switches = _recipe(t)
        for switch, value in switches.items():
            if environment.setdefault(switch, value) != value:
                raise RecipeError(f"{switch} is one switch for the whole process; {t.name} needs {value}, others not")
        recipes[key] = recipe
        chosen[name] = key
    if not recipes:
        return {"recipes": {}, "environment": {}, "megatron": {"arguments": {"bf16": True}}}
    matchers = _matchers(chosen)
    _check(matchers, chosen)
    configs = {key: _megatron_config(key) for key in [*recipes, "bf16"]}
    precision = {"configs": configs, "matchers": matchers}
    first = next(iter(recipes))
    flag = "fp4" if first == "nvfp4" else "fp8"
    arguments: Config = {"bf16": True, f"{flag}_recipe": first}
    arguments[f"{flag}_format"] = "e2m1" if flag == "fp4" else recipes[first].get("fp8_format", "E4M3").lower()
    return {
        "recipes": recipes,
        "environment": environment,
        "megatron": {"arguments": arguments, "te_precision_config_file": precision},
    }


def _recipe(t: TensorPlan) -> tuple[str, Config, dict[str, str]]:
    """Megatron's word, Transformer Engine's recipe with its arguments, environment."""
    backward = {} if t.backward == "quantized" else {"NVTE_BACKWARD_OVERRIDE": str(t.backward)}
    pair = (t.weight, t.activation)
    if pair in (("mxfp8", "mxfp8"), ("mxfp8_2d", "mxfp8")) and t.gradient in (None, "mxfp8"):
        return "mxfp8", {"class": "MXFP8BlockScaling", "fp8_format": "E4M3"}, backward
    if pair in (("fp8_tensor", "fp8_tensor"), ("fp8_tensor_pow2", "fp8_tensor_pow2")):
        powers = {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1" if t.weight == "fp8_tensor_pow2" else "0"}
        fmt = "E4M3" if t.gradient == t.activation else "HYBRID"
        return "tensorwise", {"class": "Float8CurrentScaling", "fp8_format": fmt}, backward | powers
    if pair in (("fp8_128x128", "fp8_1x128"), ("fp8_128x128_fp32", "fp8_1x128_fp32")):
        powers = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if t.weight == "fp8_128x128_fp32" else "0"}
        return "blockwise", {"class": "Float8BlockScaling", "fp8_format": "E4M3"}, backward | powers
    if t.weight in ("nvfp4", "nvfp4_2d") and t.activation in ("nvfp4", "nvfp4_row"):
        recipe = {
            "class": "NVFP4BlockScaling",
            "disable_rht": True,
            "disable_stochastic_rounding": True,
            "disable_2d_quantization": t.weight == "nvfp4",
        }
        row = "1" if t.activation == "nvfp4_row" else "0"
        return "nvfp4", recipe, backward | {"NVTE_NVFP4_ROW_SCALED_ACTIVATION": row, "NVTE_USE_FAST_MATH": "0"}
    raise RecipeError(
        f"Transformer Engine has no recipe for {t.name}: {t.weight} weights, {t.activation or 'bf16'} inputs, "
        f"{t.gradient or 'no'} gradients"
    )


def _modules(plan: Plan) -> dict[str, TensorPlan]:
    """Megatron's module path -> the answer for it."""
    found: dict[str, TensorPlan] = {}
    beyond = {layer_of(t.name) for t in plan.tensors.values() if t.kind == "extra"}
    for t in plan.tensors.values():
        layer = layer_of(t.name)
        if layer is None or not t.name.endswith(".weight") or (layer in beyond and t.weight is None):
            continue
        inside = re.sub(r"\.\d+\.", ".", t.name.partition(f"layers.{layer}.")[2].removesuffix(".weight"))
        inside = inside.replace("shared_expert.", "shared_experts.")
        if inside not in _MODULES or layer in beyond:
            if t.weight is not None:
                raise RecipeError(f"{t.name} has no name in Megatron that is known here; known: {', '.join(_MODULES)}")
            continue
        path = f"decoder.layers.{layer}.{_MODULES[inside]}"
        other = found.setdefault(path, t)
        if any(getattr(other, key) != getattr(t, key) for key in _DECISION):
            raise RecipeError(f"Megatron holds {other.name} and {t.name} as one module; the plan has two answers")
    return found


def _matchers(chosen: dict[str, str]) -> dict[str, Config]:
    """First match wins: modules on which all layers agree by one pattern, others one by one, the rest BF16."""
    inside: dict[str, set[str]] = {}
    for path, key in chosen.items():
        inside.setdefault(path.split(".", 3)[3], set()).add(key)
    matchers: dict[str, Config] = {}
    for path, key in chosen.items():
        tail = path.split(".", 3)[3]
        pattern = f"*decoder.layers.*.{tail}" if len(inside[tail]) == 1 else f"*{path}"
        label = re.sub(r"\W+", "_", pattern.strip("*"))
        matchers[label] = {"type": "glob", "enabled": True, "pattern": pattern, "config": key}
    matchers["rest"] = {"type": "glob", "enabled": True, "pattern": "*", "config": "bf16"}
    return matchers


def _check(matchers: dict[str, Config], chosen: dict[str, str]) -> None:
    for path, key in chosen.items():
        got = next(m["config"] for m in matchers.values() if fnmatchcase(path, m["pattern"]))
        if got != key:
            raise RecipeError(f"Megatron's patterns give {path} {got}, the plan {key}")


def _megatron_config(key: str) -> Config:
    kind = {"bf16": {}, "nvfp4": {"fp4_quantization_recipe": key}}.get(key, {"fp8_quantization_recipe": key})
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": kind}
