"""Where vLLM keeps each canonical tensor: module, shard of a fused matrix, expert, rows.

Written from the shapes of the model and not from the engine's own table, so that a name which the engine's loader does
not know is found by comparing what is at the place.
"""

from __future__ import annotations

from dataclasses import dataclass

from onegrid.model.spec import ModelSpec, tensor_shapes

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One canonical tensor inside the engine."""

    module: str
    """Dotted name of the module in the engine's model."""
    leaf: str
    """ "weight" or "bias"."""
    shard: str | int | None
    """What the parameter's loader calls this part of a fused matrix; None for a whole one."""
    expert: int | None
    start: int
    """First row in the fused matrix (of one expert)."""
    shape: tuple[int, ...]


def places(spec: ModelSpec) -> dict[str, Place]:
    """Canonical name -> place, every tensor of the model once."""
    shapes = tensor_shapes(spec)
    found: dict[str, Place] = {}
    for name, shape in shapes.items():
        stem, _, leaf = name.rpartition(".")
        parent, _, module = stem.rpartition(".")
        head, expert_found, tail = parent.partition(".mlp.experts.")
        shard: str | int | None = None
        expert: int | None = None
        start = 0
        if expert_found:
            stem, expert, shard = f"{head}.mlp.experts", int(tail), EXPERT[module]
            start = shapes[f"{parent}.gate_proj.weight"][0] if module == "up_proj" else 0
        elif module in QKV:
            stem, shard = f"{parent}.qkv_proj", module[0]
            start = sum(shapes[f"{parent}.{before}.weight"][0] for before in QKV[: QKV.index(module)])
        elif module in GATE_UP:
            stem, shard = f"{parent}.gate_up_proj", GATE_UP.index(module)
            start = shapes[f"{parent}.gate_proj.weight"][0] if module == "up_proj" else 0
        found[name] = Place(module=stem, leaf=leaf, shard=shard, expert=expert, start=start, shape=tuple(shape))
    return found
