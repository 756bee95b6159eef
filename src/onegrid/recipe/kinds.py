"""What a tensor is, from its canonical name alone: embedding, router, routed expert, attention projection, ...

Canonical names are the unfused Hugging Face names with one entry per expert. Index files also hold packed experts,
scales beside quantized weights and the second end of a tied head; `canonical_shapes` brings them to canonical names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from onegrid.errors import RecipeError, WeightsError

Shape = tuple[int, ...]

LINEAR_KINDS = ("attention", "latent_attention", "latent_kv_b", "mlp", "routed_expert", "shared_expert")
"""Linears of the decoder: what "everything" in a recipe means."""

GUARDED_KINDS = (
    "embedding",
    "lm_head",
    "norm",
    "router",
    "router_bias",
    "shared_expert_gate",
    "bias",
    "vision",
    "extra",
)
"""High precision unless a rule opts in by name. "extra" are linears of layers beyond the main ones (MTP)."""

KINDS = (*LINEAR_KINDS, *GUARDED_KINDS, "other")

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,18})(?=\.)")
_PACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)(?:\.weight)?$")
_SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "scale")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_proj")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_positions", "wpe")
_MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
_GATE_UP = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}


def layer_of(name: str) -> int | None:
    """Index of the decoder layer in the name, None outside layers."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def kind_of(name: str, num_layers: int) -> str:
    """One of KINDS for a canonical tensor name.

    num_layers  main decoder layers; linears of a layer at or beyond it, or below `mtp`, are "extra"
    """
    parts = name.split(".")
    kind = _plain_kind(parts)
    layer = layer_of(name)
    beyond = (layer is not None and layer >= num_layers) or "mtp" in parts[:-1]
    return "extra" if beyond and (kind in LINEAR_KINDS or kind == "other") else kind


def _plain_kind(parts: list[str]) -> str:
    leaf, module = parts[-1], parts[-2] if len(parts) > 1 else ""
    if any(p in ("visual", "vision_tower", "vision_model", "multi_modal_projector") for p in parts):
        return "vision"
    if leaf == "e_score_correction_bias":
        return "router_bias"
    if leaf == "bias":
        return "bias"
    if leaf != "weight":
        return "other"
    if module.endswith("norm") or module in ("ln_f", "ln_1", "ln_2"):
        return "norm"
    if module in _EMBEDDINGS:
        return "embedding"
    if module == "lm_head" or parts[-3:-1] == ["shared_head", "head"]:
        return "lm_head"
    if module in ("gate", "router"):
        return "router"
    if module == "shared_expert_gate":
        return "shared_expert_gate"
    if "experts" in parts:
        return "routed_expert"
    if "shared_expert" in parts or "shared_experts" in parts:
        return "shared_expert"
    if module == "kv_b_proj":
        return "latent_kv_b"
    if module in _LATENT:
        return "latent_attention"
    if "self_attn" in parts or "attention" in parts or "attn" in parts:
        return "attention"
    return "mlp" if module in _MLP else "other"


def fused_group(name: str) -> str | None:
    """The operand that engines keep this weight in together with others, None if it stands alone.

    q, k and v; gate and up; the shared down-projection of latent attention; all routed experts of a layer, once for
    gate and up and once for down. Members must have the same quantizers.
    """
    parts = name.split(".")
    if parts[-1] != "weight" or len(parts) < 3:
        return None
    module, parent = parts[-2], ".".join(parts[:-2])
    if "experts" in parts and parts[-3].isdigit():
        layer = ".".join(parts[:-3])
        return f"{layer}.{_GATE_UP.get(module, 'down_proj')}"
    if module in ("q_proj", "k_proj", "v_proj"):
        return f"{parent}.qkv_proj"
    if module in ("q_a_proj", "kv_a_proj_with_mqa"):
        return f"{parent}.fused_qkv_a_proj"
    return f"{parent}.{_GATE_UP[module]}" if module in _GATE_UP else None


def amax_group(name: str, *, share_qkv: bool) -> str | None:
    """Weights with the same answer share one amax: gate with up of one MLP or expert, q/k/v where asked."""
    parts = name.split(".")
    if parts[-1] != "weight" or len(parts) < 3:
        return None
    module, parent = parts[-2], ".".join(parts[:-2])
    if module in _GATE_UP:
        return f"{parent}.{_GATE_UP[module]}"
    if share_qkv and module in ("q_proj", "k_proj", "v_proj"):
        return f"{parent}.qkv_proj"
    return None


def packed_parts(name: str, shape: Shape) -> dict[str, Shape]:
    """Canonical name -> shape of the experts in a packed tensor, in the order of its rows; {} if it is not packed.

    `X.experts.gate_up_proj` (E, 2F, D) holds E times gate (F, D) then up (F, D); `X.experts.down_proj` is (E, D, F).
    Raises WeightsError for no experts and an odd number of gate and up rows.
    """
    found = _PACKED.match(name)
    if not found or len(shape) != 3:
        return {}
    at, module = found.groups()
    num_experts, rows, columns = shape
    if num_experts == 0:
        raise WeightsError(f"{name} has shape {shape}, 0 experts; a layer without experts has no such tensor")
    if module == "down_proj":
        return {f"{at}.{e}.down_proj.weight": (rows, columns) for e in range(num_experts)}
    if rows % 2:
        raise WeightsError(f"{name} has shape {shape}; its second axis holds gate and up and must be even")
    return {
        f"{at}.{e}.{half}.weight": (rows // 2, columns) for e in range(num_experts) for half in ("gate_proj", "up_proj")
    }


def canonical_shapes(index: Mapping[str, Iterable[int]], config: Mapping[str, Any]) -> dict[str, Shape]:
    """The index in canonical names: packed experts unpacked, scales of quantized weights and a tied head left out.

    index   tensor name -> shape, as a checkpoint has them
    config  the model's `config.json`; only `tie_word_embeddings` is read
    """
    tied = bool(text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    shapes: dict[str, Shape] = {}
    for name, given in index.items():
        shape = tuple(given)
        stem, _, leaf = name.rpartition(".")
        if leaf in _SCALES and f"{stem}.weight" in index:
            continue
        if tied and name == "lm_head.weight":
            continue
        for part, part_shape in (packed_parts(name, shape) or {name: shape}).items():
            if part in shapes:
                raise RecipeError(f"{part} is in the index twice, by itself and inside a packed tensor")
            shapes[part] = part_shape
    return shapes


def num_layers_of(config: Mapping[str, Any]) -> int:
    """Main decoder layers. RecipeError where the config does not say a whole number of at least 1."""
    found = text_config(config).get("num_hidden_layers")
    if type(found) is not int or found < 1:
        raise RecipeError(f"num_hidden_layers is {found!r} in the model's config; layer ranges need it")
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, which multimodal models keep under `text_config`."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and inner else config
