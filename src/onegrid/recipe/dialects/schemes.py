"""What configurations of published checkpoints can say: a row for each method and format, read and written alike."""

from __future__ import annotations

from dataclasses import dataclass

from onegrid.errors import RecipeError
from onegrid.recipe.dialects.modules import modules_of
from onegrid.recipe.plan import Plan

METHODS = {"deepseek": "fp8", "modelopt": "modelopt", "sglang": "mxfp8", "compressed-tensors": "compressed-tensors"}
"""Layout of a checkpoint -> `quant_method` of its configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One thing that a method can declare about a module."""

    method: str
    """ "fp8", "mxfp8", "modelopt" or "compressed-tensors"."""
    token: str
    """How the method calls it: ModelOpt's algorithm, the format of compressed-tensors, the scale's granularity."""
    weights: tuple[str, ...]
    """Quantizers whose weights it can hold; the first is what it reads as."""
    activations: tuple[str | None, ...]
    """Quantizers of the input that the declaration may stand for."""
    note: str = ""
    """What the declaration cannot say, for reports."""


_STATIC = "input scales are static in this layout and 1.0 here: calibrate them, or serve with dynamic ones"
_PER_TOKEN = "scales per token of the input are a switch of the engine, not of the checkpoint; input scales are 1.0"
_NVFP4, _MXFP8 = ("nvfp4", "nvfp4_2d"), ("mxfp8", "mxfp8_2d")
_TENSOR, _ROW = ("fp8_tensor", "fp8_tensor_pow2"), ("fp8_row", "fp8_row_pow2")
_BLOCK, _BLOCK_INPUT = ("fp8_128x128_fp32", "fp8_128x128"), ("fp8_1x128_fp32", "fp8_1x128")


def _row(method: str, token: str, weights: tuple[str, ...], activations: tuple[str | None, ...], note: str = ""):
    return Scheme(method=method, token=token, weights=weights, activations=activations, note=note)


SCHEMES: tuple[Scheme, ...] = (
    _row("fp8", "block", _BLOCK, _BLOCK_INPUT),
    _row("fp8", "tensor", _TENSOR, _TENSOR),
    _row("mxfp8", "mxfp8", _MXFP8, ("mxfp8",)),
    _row("modelopt", "FP8", _TENSOR, _TENSOR, _STATIC),
    _row("modelopt", "FP8_PB_WO", _BLOCK, (*_BLOCK_INPUT, None)),
    _row("modelopt", "FP8_PER_CHANNEL_PER_TOKEN", _ROW, _ROW),
    _row("modelopt", "NVFP4", _NVFP4, ("nvfp4_row", "nvfp4"), _PER_TOKEN),
    _row("modelopt", "W4A16_NVFP4", _NVFP4, (None,)),
    _row("modelopt", "MXFP8", _MXFP8, ("mxfp8",)),
    _row("compressed-tensors", "nvfp4-pack-quantized", _NVFP4, ("nvfp4_row", "nvfp4", None), _PER_TOKEN),
    _row("compressed-tensors", "mxfp4-pack-quantized", ("mxfp4",), ("mxfp4", "mxfp8", None)),
    _row("compressed-tensors", "mxfp8-quantized", _MXFP8, ("mxfp8", None)),
    _row("compressed-tensors", "float-quantized/block", _BLOCK, (*_BLOCK_INPUT, None)),
    _row("compressed-tensors", "float-quantized/channel", _ROW, (*_ROW, None)),
    _row("compressed-tensors", "float-quantized/tensor", _TENSOR, (*_TENSOR, None)),
)


def scheme_for(method: str, weight: str, activation: str | None) -> Scheme:
    """The row that holds this weight and can stand for this input. RecipeError names what the method can hold."""
    rows = [s for s in SCHEMES if s.method == method and weight in s.weights]
    for row in rows:
        if activation in row.activations:
            return row
    offered = (
        f"its inputs may be {', '.join(sorted({a or 'bf16' for s in rows for a in s.activations}))}"
        if rows
        else f"it holds {', '.join(sorted({w for s in SCHEMES if s.method == method for w in s.weights}))}"
    )
    raise RecipeError(f"{method!r} cannot declare {weight} weights with {activation or 'bf16'} inputs; {offered}")


def schemes_of(plan: Plan, method: str) -> dict[str, Scheme]:
    """Name of every quantized module -> the method's scheme for it, in the plan's order."""
    return {m.name: scheme_for(method, m.weight, m.activation) for m in modules_of(plan) if m.weight is not None}
