"""The published layouts: which tensors a quantized weight consists of in each. A new one is a row here.

A linear weight is [N, K]. Beside `X.weight` lie scales whose names, shapes and sense differ by layout; the global scale
of NVFP4 is a multiplier in ModelOpt and a divisor in compressed-tensors, which is why each row says it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from onegrid.errors import RecipeError
from onegrid.formats import Quantizer
from onegrid.recipe.dialects.schemes import METHODS, SCHEMES, scheme_for

Grid = Literal["scalar", "one", "rows", "column", "blocks", "four axes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Tensors of one weight under one scheme. Suffixes stand after the module's name."""

    method: str
    token: str
    """Method and token of the scheme (recipe/dialects/schemes.py)."""
    codes: str = "weight"
    packed: bool = False
    """Two 4-bit codes in a byte, U8; else F8_E4M3."""
    scales: str
    scales_dtype: str
    """Name of the element type in safetensors."""
    grid: Grid = "blocks"
    """() | (1,) | (N,) | (N, 1) | blocks of N by blocks of K | the same with axes of size 1 behind each."""
    global_scale: str | None = None
    sense: Literal["multiplier", "divisor"] = "multiplier"
    """Whether decoding multiplies by the global scale or divides by it."""
    input_scale: str | None = None
    """A static scale of the input that engines want to find; 1.0 is written."""
    one_global: bool = False
    """Engines keep one number for q, k and v, so these share an amax, as gate and up do everywhere."""


LAYOUTS: tuple[Layout, ...] = (
    Layout(method="fp8", token="block", scales="weight_scale_inv", scales_dtype="F32"),
    Layout(method="fp8", token="tensor", scales="weight_scale", scales_dtype="F32", grid="scalar", one_global=True),
    Layout(method="mxfp8", token="mxfp8", scales="weight_scale_inv", scales_dtype="U8"),
    Layout(
        method="modelopt",
        token="FP8",
        scales="weight_scale",
        scales_dtype="F32",
        grid="scalar",
        input_scale="input_scale",
        one_global=True,
    ),
    Layout(method="modelopt", token="FP8_PB_WO", scales="weight_scale", scales_dtype="F32", grid="four axes"),
    Layout(
        method="modelopt", token="FP8_PER_CHANNEL_PER_TOKEN", scales="weight_scale", scales_dtype="F32", grid="rows"
    ),
    Layout(
        method="modelopt",
        token="NVFP4",
        packed=True,
        scales="weight_scale",
        scales_dtype="F8_E4M3",
        global_scale="weight_scale_2",
        input_scale="input_scale",
        one_global=True,
    ),
    Layout(
        method="modelopt",
        token="W4A16_NVFP4",
        packed=True,
        scales="weight_scale",
        scales_dtype="F8_E4M3",
        global_scale="weight_scale_2",
        one_global=True,
    ),
    Layout(method="modelopt", token="MXFP8", scales="weight_scale", scales_dtype="U8"),
    Layout(
        method="compressed-tensors",
        token="nvfp4-pack-quantized",
        codes="weight_packed",
        packed=True,
        scales="weight_scale",
        scales_dtype="F8_E4M3",
        global_scale="weight_global_scale",
        sense="divisor",
        input_scale="input_global_scale",
        one_global=True,
    ),
    Layout(
        method="compressed-tensors",
        token="mxfp4-pack-quantized",
        codes="weight_packed",
        packed=True,
        scales="weight_scale",
        scales_dtype="U8",
    ),
    Layout(method="compressed-tensors", token="mxfp8-quantized", scales="weight_scale", scales_dtype="U8"),
    Layout(method="compressed-tensors", token="float-quantized/block", scales="weight_scale", scales_dtype="F32"),
    Layout(
        method="compressed-tensors",
        token="float-quantized/channel",
        scales="weight_scale",
        scales_dtype="F32",
        grid="column",
    ),
    Layout(
        method="compressed-tensors",
        token="float-quantized/tensor",
        scales="weight_scale",
        scales_dtype="F32",
        grid="one",
        one_global=True,
    ),
)

CODES = ("weight", "weight_packed")
"""Suffixes of weights, plain ones included."""
SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Suffixes of block, row or tensor scales that are understood in any layout; one of them, never two."""
GLOBALS = {"weight_scale_2": "multiplier", "weight_global_scale": "divisor"}
"""Suffix of a global scale -> its sense."""
INPUTS = ("input_scale", "input_global_scale")
COMPANIONS = (*SCALES, *GLOBALS, *INPUTS)


def layout_for(layout: str, weight: str, activation: str | None) -> Layout:
    """The row in which a layout ("modelopt", "sglang", ...) keeps a weight. RecipeError if it cannot.

    Where inputs stay in BF16 there is no scale of theirs: engines have no place for it and refuse the checkpoint.
    """
    if layout not in METHODS:
        raise RecipeError(f"no layout {layout!r}; layouts: {', '.join(METHODS)}")
    try:
        scheme = scheme_for(METHODS[layout], weight, activation)
    except RecipeError as error:
        able = [name for name in METHODS if name != layout and _can_hold(name, weight, activation)]
        raise RecipeError(
            f"layout {layout!r}: {error}; layouts that can: {', '.join(able) or 'none, change the recipe'}"
        ) from error
    found = next(row for row in LAYOUTS if (row.method, row.token) == (scheme.method, scheme.token))
    return found if activation is not None else replace(found, input_scale=None)


def _can_hold(layout: str, weight: str, activation: str | None) -> bool:
    rows = [s for s in SCHEMES if s.method == METHODS[layout]]
    return any(weight in s.weights and activation in s.activations for s in rows)


def holders(weights: dict[str, tuple[str, str | None]]) -> list[str]:
    """Layouts that can keep all of these tensors (name -> weight and activation)."""
    return [layout for layout in METHODS if all(_can_hold(layout, *pair) for pair in set(weights.values()))]


def grid_shape(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[int, int]:
    """Blocks along N and along K, edges included."""
    rows, columns = shape
    return tuple(1 if size is None else -(-extent // size) for extent, size in zip((rows, columns), block, strict=True))  # type: ignore[return-value]


def scale_shape(row: Layout, shape: tuple[int, ...], quantizer: Quantizer) -> tuple[int, ...]:
    """Shape of the scales on disk; tiles of several rows are written out for every row, except FP32 blocks."""
    across, along = quantizer.block
    rows, columns = grid_shape(shape, (1 if row.scales_dtype != "F32" else across, along))
    shapes: dict[str, tuple[int, ...]] = {
        "scalar": (),
        "one": (1,),
        "rows": (shape[0],),
        "column": (shape[0], 1),
        "blocks": (rows, columns),
        "four axes": (rows, 1, columns, 1),
    }
    return shapes[row.grid]
