"""`onegrid plan` on a checkpoint, on a config alone, with presets and with recipe files."""

from __future__ import annotations

import json

import pytest
import torch

from onegrid.cli.plan import plan_of, run
from onegrid.errors import ConfigError, RecipeError, WeightsError
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import save_weights
from onegrid.recipe import Plan
from tests.model.tiny import config_of


def test_a_config_alone_gives_the_plan_of_its_checkpoint(tmp_path, capsys):
    spec = ModelSpec.from_hf_config(config_of("qwen3_moe"))
    save_weights({n: torch.zeros(s) for n, s in tensor_shapes(spec).items()}, spec, tmp_path)
    plans = [plan_of("mxfp8", path) for path in (tmp_path, tmp_path / "config.json")]
    assert plans[0] == plans[1]
    assert run("mxfp8", tmp_path) == 0
    assert capsys.readouterr().out == plans[0].table() + "\n"
    assert run("mxfp8", tmp_path, as_json=True, backward="dequantized") == 0
    assert Plan.from_json(capsys.readouterr().out) == plan_of("mxfp8", tmp_path, backward="dequantized") != plans[0]


def test_a_plan_is_printed_in_the_dialect_of_an_engine(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    assert run("mxfp8", tmp_path, dialect="modelopt") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == plan_of("mxfp8", tmp_path).to("modelopt") and "lm_head" in told["quantization_config"]["ignore"]
    with pytest.raises(RecipeError, match="did you mean 'vllm'"):
        run("mxfp8", tmp_path, dialect="vlm")


def test_a_recipe_file_is_read_and_its_faults_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[recipe]\npreset = "mxfp8"\n[[recipe.rule]]\nmatch = "layers.0"\nweight = "bf16"\n')
    plan = plan_of(recipe, tmp_path)
    assert {n.split(".")[2] for n, t in plan.tensors.items() if t.weight} == {"1"}
    for text, error, message in [
        ("[model]\n", ConfigError, r"no \[recipe\] table"),
        ("[recipe", ConfigError, "is not TOML"),
        (
            '[recipe]\npreset = "mxfp8"\n[[recipe.rule]]\nmatch = "layers.7"\nweight = "bf16"\n',
            RecipeError,
            "no tensor",
        ),
    ]:
        recipe.write_text(text)
        with pytest.raises(error, match=message):
            plan_of(recipe, tmp_path)


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        plan_of("mxfp8", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        plan_of("mxfp8", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "num_hidden_layers": 2}')
    with pytest.raises(WeightsError, match="no weights, and its config alone is not enough: model_type 'deepseek_v3'"):
        plan_of("mxfp8", tmp_path)
