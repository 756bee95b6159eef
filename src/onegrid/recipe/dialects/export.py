"""One plan, every dialect: the table behind `Plan.to`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onegrid.errors import RecipeError
from onegrid.recipe.dialects import checkpoint, engines
from onegrid.recipe.dialects.megatron import te
from onegrid.recipe.plan import Plan
from onegrid.recipe.rule import nearest


def _modelopt(plan: Plan) -> dict[str, Any]:
    config = checkpoint.modelopt_config(plan)
    return {"quantization_config": config, "hf_quant_config": checkpoint.modelopt_legacy(config)}


def _wrapped(writer: Callable[[Plan], dict[str, Any]]) -> Callable[[Plan], dict[str, Any]]:
    return lambda plan: {"quantization_config": writer(plan)}


DIALECTS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "vllm": engines.vllm,
    "sglang": engines.sglang,
    "te": te,
    "hf": engines.transformers,
    "modelopt": _modelopt,
    "compressed-tensors": _wrapped(checkpoint.compressed_tensors_config),
    "deepseek": _wrapped(checkpoint.fp8_config),
    "mxfp8": _wrapped(checkpoint.mxfp8_config),
}
"""Dialect -> what writes it. The sampler's side of the plan, for "te" the learner's."""


def export(plan: Plan, dialect: str) -> dict[str, Any]:
    """The plan in a dialect, as values that JSON and YAML can hold.

    Returns, by dialect, `quantization_config` for config.json, `hf_quant_config` for ModelOpt's own file, arguments
    of an engine, or recipes, environment and Megatron's files. Raises RecipeError for an unknown dialect and for a
    plan that the dialect cannot say.
    """
    if dialect not in DIALECTS:
        raise RecipeError(f"no dialect {dialect!r}{nearest(str(dialect), DIALECTS)}; dialects: {', '.join(DIALECTS)}")
    return DIALECTS[dialect](plan)
