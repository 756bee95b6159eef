"""The plan as a picture: a grid of layers and tensors, each cell in the colour of its format."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

_LAYER = re.compile(r"^(.*?)layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
FAMILIES = ("mxfp8", "mxfp4", "nvfp4", "fp8", "bf16")
COLUMN_ORDER = (
    "input_layernorm",
    "q_norm",
    "k_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "post_attention_layernorm",
    "gate",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One tensor of one layer, or all its experts."""

    label: str
    """Format of the weight, such as "mxfp8"; "mixed" where experts differ."""
    family: str
    """What it is coloured by."""
    text: str
    """Everything about it, for a person who points at it."""
    mixed: bool
    """Whether the sampler has another format than the learner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Cells by row and column; None where a layer has no such tensor."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    single: tuple[tuple[str, Cell], ...]
    """Tensors outside the layers, such as the embedding."""
    mixed: bool
    """Whether any cell is."""
    legend: tuple[tuple[str, str, int, float], ...]
    """Format, family, tensors, share of all numbers."""


def picture(plan: dict[str, Any]) -> Picture | None:
    """The picture of plan.json; None if it has no tensors that can be drawn."""
    tensors = [t for t in plan.get("tensors") or [] if isinstance(t, dict) and isinstance(t.get("name"), str)]
    if not tensors:
        return None
    layers: dict[int, dict[str, list[dict[str, Any]]]] = {}
    single: dict[str, list[dict[str, Any]]] = {}
    for t in tensors:
        found = _LAYER.match(t["name"])
        if found:
            column = _EXPERT.sub("experts.", found[3]).removesuffix(".weight")
            layers.setdefault(int(found[2]), {}).setdefault(column, []).append(t)
        else:
            single.setdefault(t["name"].removeprefix("model.").removesuffix(".weight"), []).append(t)
    columns = sorted({column for layer in layers.values() for column in layer}, key=_order)
    numbers = [math.prod(_shape(t) or [0]) for t in tensors]
    formats = Counter(_weight(t) for t in tensors)
    share = {f: sum(n for n, t in zip(numbers, tensors, strict=True) if _weight(t) == f) for f in formats}
    return Picture(
        columns=tuple(columns),
        rows=tuple(
            (str(i), tuple(_cell(layers[i][c]) if c in layers[i] else None for c in columns)) for i in sorted(layers)
        ),
        single=tuple((name, _cell(found)) for name, found in single.items()),
        mixed=any(_sampler(t) for t in tensors),
        legend=tuple((f, family(f), n, share[f] / max(1, sum(numbers))) for f, n in formats.most_common()),
    )


def short(column: str) -> str:
    """ "self_attn.q_proj" -> "q_proj"; experts keep a mark."""
    return ("experts " if "experts." in column else "") + column.rpartition(".")[2]


def family(fmt: str) -> str:
    """The format that a quantizer belongs to, such as "fp8" for fp8_128x128; "other" for one that is new."""
    return next((name for name in FAMILIES if fmt.startswith(name)), "other")


def _order(column: str) -> tuple[int, int, str]:
    """Attention before the rest, in the order of computation."""
    leaf = column.rpartition(".")[2]
    place = COLUMN_ORDER.index(leaf) if leaf in COLUMN_ORDER else len(COLUMN_ORDER)
    return (place, "experts." in column, column)


def _shape(t: dict[str, Any]) -> list[int]:
    found = t.get("shape")
    return [n for n in found if isinstance(n, int)] if isinstance(found, list) else []


def _weight(t: dict[str, Any]) -> str:
    return str(t.get("weight") or "bf16")


def _cell(tensors: list[dict[str, Any]]) -> Cell:
    kinds = Counter(
        (_weight(t), str(t.get("activation") or "bf16"), str(t.get("backward") or ""), _sampler(t)) for t in tensors
    )
    parts = []
    for (weight, activation, backward, sampler), count in kinds.items():
        what = f"weight {weight}" + (f", input {activation}, backward {backward}" if weight != "bf16" else "")
        parts.append((f"{count} experts: " if len(tensors) > 1 else "") + what + sampler)
    weights = {weight for weight, *_ in kinds}
    label = weights.pop() if len(weights) == 1 else "mixed"
    shape = " x ".join(map(str, _shape(tensors[0]))) or "shape unknown"
    rule = ", ".join(sorted({str(t.get("rule", "?")) for t in tensors}))
    name = _EXPERT.sub("experts.*.", tensors[0]["name"]) if len(tensors) > 1 else tensors[0]["name"]
    return Cell(
        label=label,
        family="mixed" if label == "mixed" else family(label),
        text=f"{name} ({shape}): {'; '.join(parts)}; decided by {rule}",
        mixed=any(_sampler(t) for t in tensors),
    )


def _sampler(t: dict[str, Any]) -> str:
    same = (t.get("weight"), t.get("activation")) == (t.get("sampler_weight"), t.get("sampler_activation"))
    return "" if same else f", sampler {t.get('sampler_weight') or 'bf16'}/{t.get('sampler_activation') or 'bf16'}"
