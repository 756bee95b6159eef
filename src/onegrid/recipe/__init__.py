"""Which tensor gets which format: rules, presets, and the plan that they resolve to for one model."""

from onegrid.recipe.plan import Plan, TensorPlan
from onegrid.recipe.presets import PRESETS, preset
from onegrid.recipe.recipe import Recipe, recipe_from_dict
from onegrid.recipe.resolve import resolve
from onegrid.recipe.rule import Rule

__all__ = ["PRESETS", "Plan", "Recipe", "Rule", "TensorPlan", "preset", "recipe_from_dict", "resolve"]
