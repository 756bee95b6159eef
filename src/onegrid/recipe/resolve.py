"""From a recipe and a model's index to a plan: every tensor decided once, by a rule that is named, or an error.

Needs a config and the names and shapes of a safetensors index only, so that a plan exists for models that the decoder
does not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from onegrid.errors import RecipeError
from onegrid.formats import QUANTIZERS
from onegrid.recipe.exactness import notes_of, reasons_of
from onegrid.recipe.kinds import GUARDED_KINDS, amax_group, canonical_shapes, fused_group, kind_of, num_layers_of
from onegrid.recipe.plan import Plan, TensorPlan
from onegrid.recipe.recipe import Recipe
from onegrid.recipe.rule import BACKWARDS, SAME, Rule, nearest, nearest_names

_DECISION = ("weight", "activation", "gradient", "backward", "sampler_weight", "sampler_activation")


def resolve(
    recipe: Recipe, config: Mapping[str, Any], index: Mapping[str, Iterable[int]], *, backward: str | None = None
) -> Plan:
    """The plan of a recipe for one model.

    config    the dict of the model's Hugging Face `config.json`: num_hidden_layers and tie_word_embeddings are read
    index     tensor name -> shape; packed experts, scales of quantized weights and a tied head are understood
    backward  backward mode in place of the recipe's
    Raises RecipeError for a rule that matches nothing (unless optional), a tensor that nothing decides, a fused group
    that is only partly decided one way, an unknown quantizer, a guarded kind without opt-in, and a weight to quantize
    that is no matrix.
    """
    num_layers = num_layers_of(config)
    if backward is not None and backward not in BACKWARDS:
        raise RecipeError(f"backward {backward!r}{nearest(backward, BACKWARDS)} is not one of {', '.join(BACKWARDS)}")
    for rule in recipe.rules:
        _check_quantizers(rule)
    shapes = canonical_shapes(index, config)
    kinds = {name: kind_of(name, num_layers) for name in shapes}
    decided = _decide(recipe.rules, kinds, num_layers)
    mode, share_qkv = backward or recipe.backward, recipe.share_qkv_amax
    tensors = {
        name: _tensor_plan(name, shape, kind=kinds[name], rule=decided[name], mode=mode, share_qkv=share_qkv)
        for name, shape in shapes.items()
    }
    _check_fused(tensors)
    reasons = reasons_of(tensors.values(), kv_cache=recipe.kv_cache, learner_kv=recipe.learner_kv)
    return Plan(
        recipe_name=recipe.name,
        tensors=tensors,
        kv_cache=recipe.kv_cache,
        learner_kv=recipe.learner_kv,
        reference=recipe.reference,
        matmul=recipe.matmul,
        exact=not reasons,
        reasons=reasons,
        notes=notes_of(tensors.values()),
    )


def _decide(rules: Iterable[Rule], kinds: Mapping[str, str], num_layers: int) -> dict[str, Rule | None]:
    """The first rule that may decide each tensor; None for a guarded tensor that none opted in for."""
    decided: dict[str, Rule | None] = {}
    for rule in rules:
        matched = [name for name, kind in kinds.items() if rule.matches(name, kind, num_layers)]
        if not matched and not rule.optional:
            raise RecipeError(
                f"rule {str(rule)!r} matches no tensor; nearest names: {', '.join(nearest_names(rule.match, kinds))}. "
                f"Patterns hold from the first component on ('**.' in front matches anywhere); "
                f"optional = true lets a rule match nothing"
            )
        free = [name for name in matched if rule.opt_in or kinds[name] not in GUARDED_KINDS]
        guarded = sorted({kinds[name] for name in matched} & set(GUARDED_KINDS))
        quantizes = rule.weight or rule.sampler_weight not in (None, SAME)
        if quantizes and not rule.opt_in and guarded and (not free or set(rule.kinds) & set(GUARDED_KINDS)):
            raise RecipeError(
                f"rule {str(rule)!r} quantizes {', '.join(guarded)} (such as {matched[0]}), which stays in high "
                f"precision unless the rule says opt_in = true"
            )
        for name in free:
            decided.setdefault(name, rule)
    undecided = [name for name, kind in kinds.items() if name not in decided and kind not in GUARDED_KINDS]
    if undecided:
        raise RecipeError(
            f"no rule decides {len(undecided)} tensors, such as {', '.join(undecided[:3])}; "
            f'a last rule with match = "**" and weight = "bf16" keeps the rest in BF16'
        )
    return {name: decided.get(name) for name in kinds}


def _tensor_plan(
    name: str, shape: tuple[int, ...], *, kind: str, rule: Rule | None, mode: str | None, share_qkv: bool
) -> TensorPlan:
    """The answer for one tensor. None as rule is the guard."""
    if rule is None:
        rule, why = Rule(weight=None, activation=None), f"guard: {kind}"
    else:
        why = str(rule)
    sampler_weight = rule.weight if rule.sampler_weight == SAME else rule.sampler_weight
    sampler_activation = rule.activation if rule.sampler_activation == SAME else rule.sampler_activation
    if sampler_weight is None:
        sampler_activation = None
    quantized = rule.weight or sampler_weight
    if quantized and len(shape) != 2:
        raise RecipeError(f"rule {why!r} quantizes {name} to {quantized}; its shape is {shape}, only matrices can be")
    backward = (mode or rule.backward) if rule.weight else None
    if rule.weight and backward is None:
        raise RecipeError(f"rule {why!r} quantizes {name} without a backward; one of {', '.join(BACKWARDS)}")
    return TensorPlan(
        name=name,
        shape=shape,
        kind=kind,
        weight=rule.weight,
        activation=rule.activation,
        gradient=_gradient(rule, why) if backward == "quantized" else None,
        backward=backward,
        sampler_weight=sampler_weight,
        sampler_activation=sampler_activation,
        amax_group=amax_group(name, share_qkv=share_qkv) if quantized else None,
        rule=why,
    )


def _gradient(rule: Rule, why: str) -> str:
    """The gradient's quantizer in a quantized backward."""
    gradient = rule.gradient or rule.activation
    if gradient is None:
        raise RecipeError(f"rule {why!r} has a quantized backward and neither gradient nor activation to take it from")
    for name in (gradient, rule.weight, rule.activation):
        if name is not None and QUANTIZERS[name].matmul == "nvfp4":
            raise RecipeError(
                f"rule {why!r} would run its backward in {name}; NVFP4 never does: "
                f"use backward dequantized or high_precision"
            )
    return gradient


def _check_quantizers(rule: Rule) -> None:
    sides = ((rule.weight, rule.activation), (rule.sampler_weight, rule.sampler_activation))
    for name in (*(n for side in sides for n in side), rule.gradient):
        if name is not None and name != SAME and name not in QUANTIZERS:
            raise RecipeError(
                f"rule {str(rule)!r}: no quantizer {name!r}{nearest(name, QUANTIZERS)}; "
                f"quantizers: {', '.join(QUANTIZERS)}"
            )
    for weight, activation in sides:
        if None in (weight, activation) or SAME in (weight, activation):
            continue
        ways = {QUANTIZERS[str(weight)].matmul, QUANTIZERS[str(activation)].matmul}
        if len(ways) > 1 and "block_fp32" in ways:
            raise RecipeError(
                f"rule {str(rule)!r}: weights in {weight} and inputs in {activation} have no common matmul; "
                f"FP8 blocks with FP32 scales pair with each other only"
            )


def _check_fused(tensors: Mapping[str, TensorPlan]) -> None:
    """Engines keep these weights in one operand, so that they cannot have two answers."""
    groups: dict[str, dict[tuple, list[TensorPlan]]] = defaultdict(lambda: defaultdict(list))
    for name, t in tensors.items():
        group = fused_group(name)
        if group:
            groups[group][tuple(getattr(t, key) for key in _DECISION)].append(t)
    for group, answers in groups.items():
        if len(answers) > 1:
            told = "; ".join(
                f"{ts[0].name}{f' and {len(ts) - 1} more' if len(ts) > 1 else ''} -> {ts[0].weight or 'bf16'} "
                f"(inputs {ts[0].activation or 'bf16'}, {ts[0].backward or 'no'} backward, sampler "
                f"{ts[0].sampler_weight or 'bf16'}), by {ts[0].rule!r}"
                for ts in answers.values()
            )
            raise RecipeError(f"{group} is one operand and got {len(answers)} answers, make it one: {told}")
