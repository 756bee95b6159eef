"""Every tensor is decided once, by a rule that is named, or there is an error."""

from __future__ import annotations

import re

import pytest

from onegrid.errors import RecipeError, WeightsError
from onegrid.recipe import PRESETS, Recipe, Rule, resolve
from onegrid.recipe.kinds import GUARDED_KINDS, LINEAR_KINDS
from tests.recipe.models import D, V, deepseek_v3, qwen_moe

LATE = re.compile(r"layers\.[23]\.")
REST = Rule(weight=None, activation=None, optional=True)


def recipe(*rules: Rule, **settings) -> Recipe:
    return Recipe(name="test", source="test", rules=rules, **settings)


def mxfp8(**select) -> Rule:
    return Rule(weight="mxfp8", activation="mxfp8", backward="dequantized", **select)


def quantized(plan) -> set[str]:
    return {name for name, t in plan.tensors.items() if t.weight}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", [qwen_moe, deepseek_v3])
def test_every_preset_decides_every_tensor_once_and_guards_what_it_must(name, model):
    config, index = model()
    plan = resolve(PRESETS[name], config, index)
    assert plan.tensors.keys() == {n for n in index if not n.endswith("weight_scale_inv")}
    assert all(t.weight is None for t in plan.tensors.values() if t.kind in GUARDED_KINDS)
    assert all(t.rule for t in plan.tensors.values())
    assert PRESETS[name].source


def test_mxfp8_quantizes_every_decoder_linear_and_routed_expert():
    config, index = deepseek_v3()
    plan = resolve(PRESETS["mxfp8"], config, index)
    linears = {n for n, t in plan.tensors.items() if t.kind in LINEAR_KINDS and t.kind != "latent_kv_b"}
    assert quantized(plan) == linears
    assert {(t.activation, t.gradient, t.backward) for t in plan.tensors.values() if t.weight} == {
        ("mxfp8", "mxfp8", "quantized")
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.self_attn.q_a_proj.weight", "latent_attention"),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "latent_attention"),
        ("model.layers.1.self_attn.kv_b_proj.weight", "latent_kv_b"),
        ("model.layers.1.self_attn.kv_a_layernorm.weight", "norm"),
        ("model.layers.1.self_attn.o_proj.weight", "attention"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.1.mlp.gate.weight", "router"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "router_bias"),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "routed_expert"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "shared_expert"),
        ("model.layers.3.eh_proj.weight", "extra"),
        ("model.layers.3.mlp.experts.0.up_proj.weight", "extra"),
        ("model.layers.3.shared_head.head.weight", "lm_head"),
        ("model.layers.3.embed_tokens.weight", "embedding"),
    ],
)
def test_kinds_of_deepseek_names(name, kind):
    config, index = deepseek_v3(3)
    assert resolve(PRESETS["bf16"], config, index)[name].kind == kind


def test_case_R1_a_rule_that_matches_nothing_is_an_error_with_the_nearest_names():
    config, index = (
        {"num_hidden_layers": 1},
        {
            "language_model.model.layers.0.linear_attn.in_proj_qkv.weight": (D, D),
            "language_model.model.layers.0.mlp.up_proj.weight": (D, D),
        },
    )
    keep = Rule(match="linear_attn.in_proj_qkv", weight=None, activation=None)
    with pytest.raises(
        RecipeError, match=r"matches no tensor; nearest names: language_model\.model\.layers\.\*\.linear"
    ):
        resolve(recipe(keep, mxfp8()), config, index)
    plan = resolve(
        recipe(Rule(match="**.linear_attn.in_proj_qkv", weight=None, activation=None), mxfp8()), config, index
    )
    assert quantized(plan) == {"language_model.model.layers.0.mlp.up_proj.weight"}
    assert [t.rule for t in plan.tensors.values()] == ["**.linear_attn.in_proj_qkv", "**"]
    optional = Rule(match="linear_attn", weight=None, activation=None, optional=True)
    assert len(quantized(resolve(recipe(optional, mxfp8()), config, index))) == 2


def test_a_tensor_that_nothing_decides_is_an_error():
    config, index = qwen_moe()
    with pytest.raises(RecipeError, match=r"no rule decides \d+ tensors, such as model\.layers\.0\.self_attn"):
        resolve(recipe(mxfp8(kinds=("mlp", "routed_expert"))), config, index)


@pytest.mark.parametrize(
    ("select", "group"),
    [
        ({"match": "layers.0.self_attn.q_proj"}, "layers.0.self_attn.qkv_proj"),
        ({"match": "layers.0.mlp.gate_proj"}, "layers.0.mlp.gate_up_proj"),
        ({"match": "layers.1.mlp.experts.0"}, "layers.1.mlp.experts.gate_up_proj"),
        ({"match": "layers.1.mlp.experts.*.up_proj"}, "layers.1.mlp.experts.gate_up_proj"),
        ({"match": "layers.1.mlp.experts.1.down_proj"}, "layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_partly_listed_fused_group_is_an_error(select, group):
    config, index = qwen_moe()
    with pytest.raises(RecipeError, match=rf"{re.escape(group)} is one operand and got 2 answers"):
        resolve(recipe(mxfp8(**select), REST), config, index)


def test_down_may_differ_from_gate_and_up():
    config, index = qwen_moe()
    plan = resolve(recipe(mxfp8(match="layers.*.mlp.experts.*.down_proj"), REST), config, index)
    assert len(quantized(plan)) == 6


def test_an_unknown_quantizer_is_an_error_with_the_nearest():
    config, index = qwen_moe()
    wrong = Rule(weight="mxpf8", activation="mxfp8", backward="dequantized")
    with pytest.raises(RecipeError, match="no quantizer 'mxpf8' \\(did you mean 'mxfp8'"):
        resolve(recipe(wrong), config, index)


def test_case_R6_rules_of_a_user_add_to_the_guard_and_opting_in_is_explicit():
    config, index = qwen_moe()
    index = {**index, "vision_tower.blocks.0.fc.weight": (D, D)}
    keep_vision = Rule(match="vision_tower", weight=None, activation=None)
    for rules in [(keep_vision, mxfp8()), (mxfp8(),)]:
        plan = resolve(recipe(*rules), config, index)
        assert plan["lm_head.weight"].weight is None and plan["vision_tower.blocks.0.fc.weight"].weight is None
        assert plan["lm_head.weight"].rule == "guard: lm_head"
    extended = PRESETS["mxfp8"].with_rules([keep_vision])
    assert resolve(extended, config, index)["lm_head.weight"].weight is None
    for select in [{"match": "lm_head"}, {"kinds": ("lm_head", "mlp")}, {"kinds": ("router",)}]:
        with pytest.raises(RecipeError, match="stays in high precision unless the rule says opt_in"):
            resolve(PRESETS["bf16"].with_rules([mxfp8(**select)]), config, index)
    plan = resolve(PRESETS["bf16"].with_rules([mxfp8(match="lm_head", opt_in=True)]), config, index)
    assert quantized(plan) == {"lm_head.weight"}


def test_case_R7_a_tied_head_stays_one_with_its_embedding_in_high_precision():
    config, index = qwen_moe(tied=True)
    for stored in (index, {**index, "lm_head.weight": (V, D)}):
        plan = resolve(recipe(mxfp8()), config, stored)
        assert "lm_head.weight" not in plan.tensors
        assert plan["model.embed_tokens.weight"].weight is None
        with pytest.raises(RecipeError, match="'lm_head' matches no tensor"):
            resolve(recipe(mxfp8(match="lm_head", opt_in=True), REST), config, stored)


def test_case_R10_layers_kept_at_both_ends_are_the_same_for_learner_sampler_and_pipeline_stages():
    config, index = qwen_moe(4)
    keep = Rule(layers=("first 1", "last 1"), weight=None, activation=None)
    plan = resolve(PRESETS["mxfp8"].with_rules([keep]), config, index)
    layers = {int(n.split(".")[2]) for n in quantized(plan)}
    assert layers == {1, 2}
    assert {n for n, t in plan.tensors.items() if t.sampler_weight} == quantized(plan)
    # A pipeline stage that numbers layers 2 and 3 as 0 and 1 asks by the global name, and gets the global answer.
    local = {n.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1."): n for n in index if LATE.search(n)}
    assert {n.split(".")[2] for n, name in local.items() if plan[name].weight} == {"0"}


def test_layer_ranges_count_main_layers_only():
    config, index = deepseek_v3(3)
    keep = Rule(layers=("last 1",), weight=None, activation=None)
    plan = resolve(PRESETS["mxfp8"].with_rules([keep]), config, index)
    assert {n.split(".")[2] for n in quantized(plan)} == {"0", "1"}
    assert plan["model.layers.3.mlp.experts.0.up_proj.weight"].rule == "guard: extra"


def test_case_Q22_router_and_its_correction_never_leave_high_precision():
    config, index = deepseek_v3()
    for rules in [(mxfp8(),), (mxfp8(match="**.mlp"), REST), PRESETS["mxfp4"].rules]:
        plan = resolve(recipe(*rules), config, index)
        routers = [t for t in plan.tensors.values() if t.kind in ("router", "router_bias")]
        assert len(routers) == 6 and all(t.weight is t.activation is t.sampler_weight is None for t in routers)


def test_case_C1_rules_see_experts_in_both_spellings():
    config, index = qwen_moe(2)
    packed = {n: s for n, s in index.items() if ".experts." not in n}
    packed |= {
        "model.layers.1.mlp.experts.gate_up_proj": (2, 32, D),
        "model.layers.1.mlp.experts.down_proj": (2, D, 16),
    }
    for name in ("mxfp8", "nvfp4_experts"):
        one, other = (resolve(PRESETS[name], config, shapes) for shapes in (index, packed))
        assert one.tensors == other.tensors and one.digest == other.digest
    with pytest.raises(RecipeError, match="in the index twice"):
        resolve(PRESETS["mxfp8"], config, {**index, **packed})
    with pytest.raises(WeightsError, match="must be even"):
        resolve(PRESETS["mxfp8"], config, {"model.layers.1.mlp.experts.gate_up_proj": (2, 33, D)})


def test_only_matrices_can_be_quantized():
    config, index = qwen_moe()
    with pytest.raises(RecipeError, match=r"its shape is \(32,\), only matrices"):
        resolve(recipe(mxfp8(match="norm", opt_in=True), REST), config, index)


def test_gate_shares_its_amax_with_up_and_qkv_only_when_asked():
    config, index = qwen_moe()
    at = "model.layers.1"
    for asked in (False, True):
        plan = resolve(recipe(mxfp8(), share_qkv_amax=asked), config, index)
        expert = [plan[f"{at}.mlp.experts.1.{p}_proj.weight"].amax_group for p in ("gate", "up", "down")]
        assert expert == [f"{at}.mlp.experts.1.gate_up_proj"] * 2 + [None]
        qkv = [plan[f"{at}.self_attn.{p}_proj.weight"].amax_group for p in "qkvo"]
        assert qkv == ([f"{at}.self_attn.qkv_proj"] * 3 if asked else [None] * 3) + [None]


def test_the_backward_of_a_recipe_can_be_replaced_but_nvfp4_never_runs_it_in_fp4():
    config, index = qwen_moe()
    plan = resolve(PRESETS["mxfp8"], config, index, backward="high_precision")
    assert {(t.backward, t.gradient) for t in plan.tensors.values() if t.weight} == {("high_precision", None)}
    plan = resolve(PRESETS["mxfp4"], config, index, backward="quantized")
    assert {t.gradient for t in plan.tensors.values() if t.weight} == {"mxfp4"}
    for name in ("nvfp4_experts", "nvfp4_all"):
        assert {t.backward for t in resolve(PRESETS[name], config, index).tensors.values() if t.weight} == {
            "dequantized"
        }
        with pytest.raises(RecipeError, match="NVFP4 never does"):
            resolve(PRESETS[name], config, index, backward="quantized")
    with pytest.raises(RecipeError, match="did you mean 'quantized'"):
        resolve(PRESETS["mxfp8"], config, index, backward="quantised")


def test_a_config_without_layers_is_an_error():
    with pytest.raises(RecipeError, match="num_hidden_layers is None"):
        resolve(PRESETS["bf16"], {}, {"lm_head.weight": (V, D)})
