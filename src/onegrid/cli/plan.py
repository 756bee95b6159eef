"""`onegrid plan`: what a recipe makes of every tensor of a model, before anything is trained."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from onegrid.errors import ConfigError, SpecError, WeightsError
from onegrid.model.shards import INDEX, SINGLE
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import read_index
from onegrid.recipe import Plan, Recipe, preset, recipe_from_dict, resolve


def run(
    recipe: str | Path,
    model: Path,
    *,
    as_json: bool = False,
    backward: str | None = None,
    dialect: str | None = None,
) -> int:
    """Print the plan and return 0; errors are raised for the command line to show.

    recipe    name of a preset, or a TOML file with a [recipe] table
    model     folder of a checkpoint, or a config.json alone (then the names and shapes follow from the config)
    as_json   print JSON instead of a table
    backward  backward mode in place of the recipe's
    dialect   print, as JSON, the plan as an engine or a layout reads it: see `Plan.to`
    """
    plan = plan_of(recipe, model, backward=backward)
    if dialect is not None:
        print(json.dumps(plan.to(dialect), indent=2))
    else:
        print(plan.to_json() if as_json else plan.table())
    return 0


def plan_of(recipe: str | Path, model: Path, *, backward: str | None = None) -> Plan:
    """The plan of a preset or recipe file for a checkpoint folder or a config.json; arguments as for `run`."""
    folder = model if model.is_dir() else model.parent
    config = _read_config(model / "config.json" if model.is_dir() else model)
    has_weights = model.is_dir() and any((folder / name).exists() for name in (SINGLE, INDEX))
    try:
        index = read_index(folder) if has_weights else tensor_shapes(ModelSpec.from_hf_config(config))
    except SpecError as error:
        raise WeightsError(f"{model} has no weights, and its config alone is not enough: {error}") from error
    return resolve(read_recipe(recipe), config, index, backward=backward)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a checkpoint folder or a config.json") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, a model's config is an object")
    return config


def read_recipe(recipe: str | Path) -> Recipe:
    """The recipe of a preset's name, or of the [recipe] table of a TOML file."""
    path = Path(recipe)
    if path.suffix != ".toml":
        return preset(str(recipe))
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if not isinstance(table.get("recipe"), dict):
        raise ConfigError(f"{path} has no [recipe] table; it names a preset or lists [[recipe.rule]] entries")
    return recipe_from_dict(table["recipe"])
