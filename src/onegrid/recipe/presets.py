"""Recipes under a name, each with its source. A preset is the whole answer; rules may be added before its own.

Shared by all: guarded kinds (lm_head, embeddings, norms, router, biases, MTP) stay BF16, and so do the value and key
up-projections of latent attention, whose contraction axis changes where an engine absorbs them.
"""

from __future__ import annotations

from onegrid.errors import RecipeError
from onegrid.recipe.recipe import Recipe
from onegrid.recipe.rule import Rule, nearest

_REST = Rule(match="**", weight=None, activation=None, optional=True)
_LATENT_KV_B = Rule(kinds=("latent_kv_b",), weight=None, activation=None, optional=True)


def _linears(weight: str, activation: str, *, backward: str, gradient: str | None = None) -> tuple[Rule, ...]:
    """Every decoder linear and routed expert alike, the rest BF16."""
    quantized = Rule(kinds=("linear",), weight=weight, activation=activation, gradient=gradient, backward=backward)
    return (_LATENT_KV_B, quantized, _REST)


_LAST_15_BF16 = (
    Rule(layers=("last 15%",), weight=None, activation=None),
    Rule(kinds=("shared_expert",), weight=None, activation=None, optional=True),
)
_MXFP8 = _linears("mxfp8", "mxfp8", gradient="mxfp8", backward="quantized")
_EXPERTS = Rule(kinds=("routed_expert",), weight="nvfp4", activation="nvfp4_row", backward="dequantized")

_ALL = (
    Recipe(name="bf16", source="the high-precision baseline", rules=(_REST,)),
    Recipe(
        name="fp8_tensor",
        source="Transformer Engine Float8CurrentScaling, HYBRID (E5M2 gradients)",
        rules=_linears("fp8_tensor", "fp8_tensor", gradient="fp8_tensor_e5m2", backward="quantized"),
    ),
    Recipe(
        name="fp8_row",
        source="FP8 with a scale per token and per output channel, as vLLM's dynamic per-token FP8",
        rules=_linears("fp8_row", "fp8_row", backward="dequantized"),
    ),
    Recipe(
        name="fp8_block",
        source="DeepSeek-V3 technical report (1x128 activations, 128x128 weights); power-of-two scales as in "
        "Transformer Engine Float8BlockScaling",
        rules=_linears("fp8_128x128", "fp8_1x128", gradient="fp8_1x128", backward="quantized"),
    ),
    Recipe(
        name="mxfp8",
        source="end-to-end MXFP8 RL in verl: every decoder linear and routed expert, forward, dgrad and wgrad",
        rules=_MXFP8,
    ),
    Recipe(
        name="mxfp8_last15_bf16",
        source="ablation of MXFP8 RL in Miles: the last 15 % of layers and shared experts in BF16",
        rules=(*_LAST_15_BF16, *_MXFP8),
    ),
    Recipe(
        name="nvfp4_experts",
        source="NVFP4 RL in Miles: routed experts only, an FP32 scale per token, no FP4 in the backward",
        rules=(_EXPERTS, _REST),
    ),
    Recipe(
        name="nvfp4_all",
        source="the per-token NVFP4 rule of Transformer Engine on every decoder linear, for dense models",
        rules=_linears("nvfp4", "nvfp4_row", backward="dequantized"),
    ),
    Recipe(
        name="mxfp4",
        source="OCP Microscaling Formats 1.0 with NVIDIA's round-up scale, on every decoder linear",
        rules=_linears("mxfp4", "mxfp4", backward="dequantized"),
    ),
)

PRESETS: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Name -> recipe."""


def preset(name: str) -> Recipe:
    """The preset of that name. RecipeError with the nearest name otherwise."""
    if name not in PRESETS:
        raise RecipeError(f"no preset {name!r}{nearest(str(name), PRESETS)}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
