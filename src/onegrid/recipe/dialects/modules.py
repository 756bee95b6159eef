"""Modules as engines name them: fused projections, one module for all experts of a layer, and which weights each holds.

Exclusion lists name modules, plans name tensors; every dialect and every audit goes through this one translation.
"""

from __future__ import annotations

from dataclasses import dataclass

from onegrid.errors import RecipeError
from onegrid.recipe.kinds import fused_group
from onegrid.recipe.plan import Plan, TensorPlan

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Last component of a fused module -> those of its shards, in their order."""

_NO_LINEAR = ("embedding", "norm")


@dataclass(frozen=True, slots=True)
class Module:
    """One module of an engine and what it is made of."""

    name: str
    """As engines build it, such as "model.layers.0.self_attn.qkv_proj" or "model.layers.0.mlp.experts"."""
    kind: str
    """ "linear", "experts" (all routed experts of a layer) or "head"."""
    shards: tuple[str, ...]
    """Unfused module names, the names without ".weight" of the tensors below."""
    weight: str | None
    """Quantizer of the sampler's weight; None is BF16."""
    activation: str | None


def modules_of(plan: Plan) -> list[Module]:
    """Every module of the plan's model that holds a matrix an engine could quantize, in the plan's order.

    Embeddings are left out: no engine here quantizes a lookup. Raises RecipeError where one module would need two
    answers: engines keep all experts of a layer, gate, up and down, in one module.
    """
    groups: dict[tuple[str, str], list[TensorPlan]] = {}
    for name, planned in plan.tensors.items():
        if name.endswith(".weight") and len(planned.shape) == 2 and planned.kind not in _NO_LINEAR:
            groups.setdefault(_module_of(name, planned.kind), []).append(planned)
    modules = []
    for (name, kind), members in groups.items():
        answers = {(t.sampler_weight, t.sampler_activation) for t in members}
        if len(answers) > 1:
            told = ", ".join(f"{t.name} -> {t.sampler_weight or 'bf16'}" for t in members[:: max(1, len(members) // 3)])
            raise RecipeError(f"engines hold {name} as one module, and the plan has several answers for it: {told}")
        shards = tuple(t.name.removesuffix(".weight") for t in members)
        modules.append(Module(name, kind, shards, *answers.pop()))
    return modules


def _module_of(name: str, kind: str) -> tuple[str, str]:
    stem = name.removesuffix(".weight")
    parts = stem.split(".")
    if "experts" in parts and parts[parts.index("experts") + 1 :][:1] and parts[parts.index("experts") + 1].isdigit():
        return ".".join(parts[: parts.index("experts") + 1]), "experts"
    if kind == "lm_head":
        return stem, "head"
    fused = fused_group(name)
    return (fused, "linear") if fused and fused.rsplit(".", 1)[-1] in FUSED else (stem, "linear")


def excluded_names(plan: Plan) -> list[str]:
    """What stays in BF16, in the spelling that every engine here understands the same way.

    Every unquantized matrix by the full name of its unfused module, and `X.experts` without a number beside the single
    experts. No wildcards, no short names: `mlp.gate` alone, or `model.layers.1`, mean more than they say in one engine
    or another. A tied head is listed too, since engines build a module for it.
    """
    names: dict[str, None] = {}
    for module in modules_of(plan):
        if module.weight is None:
            names |= dict.fromkeys(module.shards)
            if module.kind == "experts":
                names[module.name] = None
    if "lm_head.weight" not in plan.tensors:
        names["lm_head"] = None
    return list(names)
