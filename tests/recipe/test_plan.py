"""What a plan promises, and that it survives being written down."""

from __future__ import annotations

import json
import tomllib

import pytest
import tomli_w

from onegrid.errors import ConfigError, RecipeError
from onegrid.recipe import PRESETS, Plan, Rule, preset, recipe_from_dict, resolve
from tests.recipe.models import deepseek_v3, qwen_moe


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_exact_but_the_tensorwise_one(name):
    plan = resolve(PRESETS[name], *qwen_moe())
    assert plan.exact == (name != "fp8_tensor") == (not plan.reasons)
    assert not plan.mixed


def test_tensorwise_activations_say_why_and_offer_a_scale_per_row():
    plan = resolve(PRESETS["fp8_tensor"], *qwen_moe())
    assert not plan.exact
    assert "one scale spans the batch; fp8_row has one per token" in plan.reasons[0]


def test_a_sampler_with_other_quantizers_makes_a_mixed_pairing():
    bf16_sampler = Rule(
        kinds=("linear",),
        weight="mxfp8",
        activation="mxfp8",
        backward="quantized",
        sampler_weight=None,
        layers=("0-1",),
    )
    plan = resolve(PRESETS["mxfp8"].with_rules([bf16_sampler]), *qwen_moe())
    assert plan.mixed and not plan.exact
    mixed = [t for t in plan.tensors.values() if t.mixed]
    assert {(t.weight, t.sampler_weight, t.sampler_activation) for t in mixed} == {("mxfp8", None, None)}
    assert f"mixed pairing: {len(mixed)} tensors are mxfp8 with mxfp8 inputs in the learner and bf16" in plan.reasons[0]
    assert "mixed" in plan.table()


def test_a_quantized_cache_is_exact_only_if_the_learner_reads_it_too():
    for cache, learner, exact in [("fp8", "bf16", False), ("fp8", "fp8", True), ("bf16", "fp8", False)]:
        recipe = recipe_from_dict({"preset": "mxfp8", "kv_cache": cache, "learner_kv": learner})
        plan = resolve(recipe, *qwen_moe())
        assert plan.exact is exact and (plan.kv_cache, plan.learner_kv) == (cache, learner)


def test_gradients_that_depend_on_the_micro_batch_split_are_noted():
    notes = " ".join(resolve(PRESETS["mxfp8"], *qwen_moe()).notes)
    assert "18 routed experts depend on the micro-batch split" in notes and "multiple of 32 tokens" in notes
    assert "multiple of 128" in " ".join(resolve(PRESETS["fp8_block"], *qwen_moe()).notes)
    assert "spans its tokens" in " ".join(resolve(PRESETS["fp8_tensor"], *qwen_moe()).notes)
    assert resolve(PRESETS["mxfp8"], *qwen_moe(), backward="dequantized").notes == ()


def test_the_digest_tells_plans_apart_by_what_they_compute():
    model = qwen_moe()
    digests = {resolve(recipe, *model).digest for recipe in PRESETS.values()}
    assert len(digests) == len(PRESETS)
    same = recipe_from_dict({"name": "other name", "preset": "mxfp8"})
    assert resolve(same, *model).digest == resolve(PRESETS["mxfp8"], *model).digest
    assert resolve(PRESETS["mxfp8"], *model, backward="dequantized").digest not in digests


def test_a_plan_reads_back_from_its_json_and_notices_a_change():
    plan = resolve(PRESETS["mxfp8_last15_bf16"], *deepseek_v3())
    text = plan.to_json()
    back = Plan.from_json(text)
    assert back == plan and back.digest == plan.digest
    data = json.loads(text)
    data["tensors"][3]["weight"] = "mxfp4"
    with pytest.raises(RecipeError, match="changed after it was written"):
        Plan.from_json(json.dumps(data))
    for wrong in ("", "[]", "{}", '{"digest": 1}'):
        with pytest.raises(RecipeError, match="not a plan"):
            Plan.from_json(wrong)


def test_the_table_has_one_row_for_tensors_that_differ_in_numbers_only():
    plan = resolve(PRESETS["mxfp8"], *qwen_moe())
    assert "model.layers.[1-3].mlp.experts.[0-1].gate_proj.weight" in plan.table()
    full = plan.table(full=True)
    assert all(f"\n{name} " in full for name in plan.tensors)
    assert plan.digest in full


def test_an_unknown_tensor_is_an_error_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no tensor 'model\.layers\.0\.mlp\.gateproj\.weight'; nearest"):
        resolve(PRESETS["mxfp8"], *qwen_moe())["model.layers.0.mlp.gateproj.weight"]


@pytest.mark.parametrize("name", PRESETS)
def test_case_R9_rules_that_are_exported_decide_every_tensor_as_before(name):
    keep_router = Rule(match="layers.*.mlp.gate", weight=None, activation=None)
    model = qwen_moe()
    recipe = PRESETS[name].with_rules([keep_router])
    text = tomli_w.dumps({"recipe": recipe.to_dict()})
    again = recipe_from_dict(tomllib.loads(text)["recipe"])
    assert again == recipe
    stored, decided = resolve(recipe, *model), resolve(again, *model)
    assert decided.tensors == stored.tensors and decided.digest == stored.digest
    assert decided["model.layers.1.mlp.gate.weight"].weight is None


def test_a_toml_table_adds_rules_before_those_of_its_preset():
    text = """
        preset = "mxfp8"
        backward = "dequantized"
        [[rule]]
        match = "layers.*.mlp.experts.*.down_proj"
        weight = "bf16"
        [[rule]]
        kinds = "attention"
        layers = ["first 1", "last 1"]
        weight = "mxfp8"
        activation = "mxfp8"
        backward = "high_precision"
        sampler = "bf16"
    """
    plan = resolve(recipe_from_dict(tomllib.loads(text)), *qwen_moe())
    assert plan["model.layers.1.mlp.experts.0.down_proj.weight"].weight is None
    q = plan["model.layers.3.self_attn.q_proj.weight"]
    assert (q.weight, q.sampler_weight, q.backward, q.rule) == (
        "mxfp8",
        None,
        "dequantized",
        "kinds attention; layers first 1, last 1",
    )
    assert not plan["model.layers.1.self_attn.q_proj.weight"].mixed


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"preset": "mxfp8", "bakward": "quantized"}, "recipe.bakward.*did you mean 'backward'"),
        (
            {"preset": "mxfp8", "rule": [{"mach": "x", "weight": "bf16"}]},
            r"recipe\.rule\[0\]\.mach.*did you mean 'match'",
        ),
        ({"preset": "mxfp8", "rule": [{"match": "**"}]}, "has no weight"),
        ({"preset": "mxfp8", "rule": [{"weight": "mxfp8"}]}, "says nothing of activation"),
        ({"preset": "mxfp8", "rule": {"weight": "mxfp8"}}, "as its own"),
        ({"preset": "mxfp8", "rule": [{"weight": "bf16", "opt_in": "yes"}]}, "must be true or false"),
        ({"preset": "mxfp8", "kv_cache": 8}, "kv_cache is 8"),
    ],
)
def test_a_table_with_a_wrong_key_or_type_is_an_error(table, message):
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(table)


def test_impossible_values_of_a_recipe_are_errors():
    for table, message in [
        ({"preset": "mxfp9"}, "did you mean 'mxfp"),
        ({"preset": "mxfp8", "kv_cache": "fp4"}, "must be one of bf16, fp8"),
        ({"name": "empty"}, "has no rules"),
    ]:
        with pytest.raises(RecipeError, match=message):
            recipe_from_dict(table)
    with pytest.raises(RecipeError, match="did you mean 'nvfp4_all'"):
        preset("nvfp4_al")
