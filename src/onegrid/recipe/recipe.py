"""A recipe: ordered rules and a few settings of the whole model, from Python or from a TOML table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onegrid.errors import ConfigError, RecipeError
from onegrid.recipe.rule import BACKWARDS, Rule, nearest

BF16 = "bf16"
"""How None is written in a table, where there is no None."""

_ROLES = ("weight", "activation", "gradient", "sampler_weight", "sampler_activation")
_CHOICES = {
    "kv_cache": ("bf16", "fp8"),
    "learner_kv": ("bf16", "fp8"),
    "reference": ("bf16", "plan"),
    "matmul": ("grid", "native"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Which tensor becomes what, as rules. `onegrid.recipe.resolve` turns it into a plan for one model."""

    name: str
    source: str
    """Where the recipe comes from."""
    rules: tuple[Rule, ...]
    """First match wins. Guarded kinds (lm_head, embedding, norm, router, ...) stay BF16 without an opt-in."""
    kv_cache: str = "bf16"
    """The sampler's key/value cache: "bf16" or "fp8"."""
    learner_kv: str = "bf16"
    """Whether the learner's attention reads keys and values through the same FP8 grid: "bf16" or "fp8"."""
    reference: str = "bf16"
    """Precision of the reference policy: "bf16" or "plan"."""
    matmul: str = "grid"
    """"grid": exact products of decoded values, FP32 sums, the same function on every device. "native": FP8 products of
    quantized dense linears by a Hopper's matrix units, whose partial sums keep 13 bits: other values, on both sides."""
    backward: str | None = None
    """Replaces the backward mode of every rule that quantizes."""
    share_qkv_amax: bool = False
    """q, k and v of a layer share one amax, as engines with one global scale per fused operand need."""

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            value = getattr(self, key)
            if value not in allowed:
                raise RecipeError(f"recipe {self.name!r}: {key} is {value!r}; it must be one of {', '.join(allowed)}")
        if self.backward is not None and self.backward not in BACKWARDS:
            raise RecipeError(f"recipe {self.name!r}: backward {self.backward!r} is not one of {', '.join(BACKWARDS)}")
        if not self.rules:
            raise RecipeError(f"recipe {self.name!r} has no rules; BF16 throughout is the preset 'bf16'")

    def with_rules(self, rules: Iterable[Rule]) -> Recipe:
        """This recipe with more rules, which come before its own. The guard on lm_head, router, ... stays."""
        return dataclasses.replace(self, rules=(*rules, *self.rules))

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a table; `recipe_from_dict` reads it back."""
        settings = ("name", "source", *_CHOICES, "share_qkv_amax")
        table: dict[str, Any] = {key: getattr(self, key) for key in settings}
        if self.backward is not None:
            table["backward"] = self.backward
        return table | {"rule": [_rule_to_dict(rule) for rule in self.rules]}


def recipe_from_dict(table: Mapping[str, Any]) -> Recipe:
    """A recipe from the `[recipe]` table of a configuration.

    `preset` names where to start from; every `[[recipe.rule]]` is added before the preset's rules. Without a preset,
    the rules are all there is and must decide every tensor. "bf16" stands for None; `sampler = "x"` in a rule is short
    for `sampler_weight` and `sampler_activation`.
    Raises ConfigError for an unknown key (with the nearest one) or type, RecipeError for an impossible value.
    """
    from onegrid.recipe.presets import preset

    fields = {f.name for f in dataclasses.fields(Recipe)} - {"rules"} | {"preset", "rule"}
    _check_keys(table, fields, "recipe")
    entries = table.get("rule", [])
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"recipe.rule is {entries!r}; write each rule as its own [[recipe.rule]] table")
    rules = tuple(_rule_from_dict(entry, f"recipe.rule[{i}]") for i, entry in enumerate(entries))
    settings = {key: value for key, value in table.items() if key not in ("preset", "rule")}
    for key, value in settings.items():
        wanted = bool if key == "share_qkv_amax" else str
        if not isinstance(value, wanted):
            raise ConfigError(f"recipe.{key} is {value!r}; it must be a {wanted.__name__}")
    if "preset" in table:
        return dataclasses.replace(preset(table["preset"]).with_rules(rules), **settings)
    return Recipe(**{"name": "custom", "source": "this configuration", **settings}, rules=rules)


def _rule_from_dict(entry: Any, where: str) -> Rule:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {entry!r}; it must be a table")
    fields = {f.name: f for f in dataclasses.fields(Rule)}
    _check_keys(entry, {*fields, "sampler"}, where)
    values = dict(entry)
    if "sampler" in values:
        short = values.pop("sampler")
        values = {"sampler_weight": short, "sampler_activation": short} | values
    if "weight" not in values:
        raise ConfigError(f'{where} has no weight; name a quantizer, or "bf16" to keep BF16')
    values.setdefault("activation", BF16 if values["weight"] == BF16 else None)
    if values["activation"] is None:
        raise ConfigError(f'{where} quantizes the weight and says nothing of activation; name a quantizer or "bf16"')
    for key, value in values.items():
        if key in ("kinds", "layers"):
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                raise ConfigError(f"{where}.{key} is {value!r}; it must be a list of strings")
            values[key] = tuple(value)
        elif not isinstance(value, bool if key in ("optional", "opt_in") else str):
            wanted = "true or false" if key in ("optional", "opt_in") else "a string"
            raise ConfigError(f"{where}.{key} is {value!r}; it must be {wanted}")
        elif key in _ROLES and value == BF16:
            values[key] = None
    return Rule(**values)


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if value == field.default and field.name not in ("weight", "activation"):
            continue
        table[field.name] = list(value) if isinstance(value, tuple) else BF16 if value is None else value
    return table


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown key {where}.{key}{nearest(key, known)}; keys: {', '.join(known)}")
