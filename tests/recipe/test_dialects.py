"""The plan in every dialect says what the plan means, to each engine in its own way of reading."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

from onegrid.errors import RecipeError
from onegrid.recipe import PRESETS, Rule, preset, resolve
from onegrid.recipe.dialects.checkpoint import modelopt_legacy
from onegrid.recipe.dialects.departures import departures
from onegrid.recipe.dialects.foreign import read_config
from onegrid.recipe.dialects.matchers import MATCHERS, READERS
from onegrid.recipe.dialects.modules import Module, excluded_names, modules_of
from tests.recipe.engines_oracle import ORACLES
from tests.recipe.models import deepseek_v3, qwen_moe

ENGINES = ("vllm-fp8", "vllm-modelopt", "sglang-fp8", "sglang-modelopt", "sglang-modelopt")
L1 = "model.layers.1"
NO, YES, REFUSED, ABSENT = False, True, None, "-"

# entry, module, then: vLLM fp8, vLLM ModelOpt, SGLang fp8 and mxfp8, SGLang ModelOpt linear, SGLang ModelOpt MoE
TABLE = [
    (f"{L1}.mlp.gate", f"{L1}.mlp.gate", YES, YES, YES, YES, ABSENT),
    (f"{L1}.mlp.gate", f"{L1}.mlp.gate_up_proj", NO, YES, NO, NO, ABSENT),
    ("mlp.gate", f"{L1}.mlp.gate_up_proj", NO, YES, NO, NO, ABSENT),
    (L1, "model.layers.10.mlp.down_proj", NO, YES, NO, NO, ABSENT),
    (f"{L1}*", "model.layers.10.mlp.down_proj", NO, YES, NO, YES, ABSENT),
    (f"{L1}*", "model.layers.10.mlp.experts", ABSENT, ABSENT, ABSENT, ABSENT, YES),
    (f"{L1}.*", f"{L1}.mlp.experts", NO, YES, NO, ABSENT, YES),
    (f"{L1}.self_attn", f"{L1}.self_attn.qkv_proj", NO, YES, YES, YES, ABSENT),
    (f"{L1}.self_attn.q_proj", f"{L1}.self_attn.qkv_proj", REFUSED, REFUSED, REFUSED, REFUSED, ABSENT),
    (f"{L1}.self_attn.qkv_proj", f"{L1}.self_attn.qkv_proj", YES, YES, NO, YES, ABSENT),
    ("*self_attn*", f"{L1}.self_attn.o_proj", NO, YES, NO, YES, ABSENT),
    (f"{L1}.mlp.experts.0.down_proj", f"{L1}.mlp.experts", YES, YES, YES, ABSENT, NO),
    (f"{L1}.mlp.experts", f"{L1}.mlp.experts", YES, YES, YES, ABSENT, YES),
    (f"{L1}.mlp", f"{L1}.mlp.experts", NO, YES, YES, ABSENT, NO),
    # a substring, since "language_model" ends in "model"; and SGLang's fp8 drops a leading "model." from entries
    (f"{L1}.mlp.gate", "model.language_model.layers.1.mlp.gate", NO, YES, YES, NO, ABSENT),
]
SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def module(name):
    parent, _, last = name.rpartition(".")
    if last == "experts":
        return Module(
            name, "experts", tuple(f"{name}.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")), None, None
        )
    return Module(name, "linear", tuple(f"{parent}.{s}" for s in SHARDS.get(last, (last,))), None, None)


def reading(engine, entries, of):
    try:
        return MATCHERS[engine](entries, of)
    except RecipeError:
        return REFUSED


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]} on {row[1]}")
def test_case_R3_engines_read_an_entry_each_in_its_own_way(row):
    entry, name, *answers = row
    for engine, answer in zip(ENGINES, answers, strict=True):
        if answer != ABSENT:
            assert reading(engine, [entry], module(name)) is answer, engine
            assert ORACLES[engine]([entry], name, name.endswith("experts")) is answer, f"oracle of {engine}"


@pytest.mark.parametrize("engine", ORACLES)
def test_matchers_agree_with_an_oracle_that_was_written_from_the_rules(engine):
    names = [
        *(f"model.layers.{n}.{m}" for n in (1, 10) for m in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate")),
        *(f"{L1}.mlp.{m}" for m in ("gate_up_proj", "down_proj", "experts", "shared_expert.gate_up_proj")),
        f"{L1}.mlp.shared_experts.down_proj",
        f"{L1}.mlp.shared_expert_gate",
        "lm_head",
        "mtp.lm_head",
        "language_model.model.layers.1.mlp.gate",
    ]
    entries = [
        *{part for name in names for part in (name, name.rpartition(".")[0], name.rpartition(".")[2]) if part},
        *(shard for name in names for shard in module(name).shards),
        *(f"{L1}.self_attn.{n}_proj" for n in "qkv"),
        *("mlp.gate", "*self_attn*", f"{L1}*", f"{L1}.*", "*experts*", "re:.*mlp.gate$", "re:.*up_proj", "lm*"),
    ]
    lists = [[e] for e in entries] + [entries[i::7] for i in range(7)] + [[]]
    for listed in lists:
        for name in names:
            wanted = ORACLES[engine](listed, name, name.endswith(".experts"))
            assert reading(engine, listed, module(name)) is wanted, (listed, name)


@pytest.mark.parametrize("model", [qwen_moe, deepseek_v3])
@pytest.mark.parametrize("name", [n for n in PRESETS if n != "bf16"])
def test_every_configuration_reads_back_as_the_plan(name, model):
    plan = resolve(preset(name), *model())
    stored = {t.name: t.sampler_weight for t in plan.tensors.values()}
    num_written = 0
    for dialect in ("modelopt", "compressed-tensors", "deepseek", "mxfp8", "sglang", "hf"):
        try:
            said = plan.to(dialect)
        except RecipeError as error:
            assert "cannot declare" in str(error)
            continue
        num_written += 1
        said = json.loads(json.dumps(said))
        found = departures(plan, read_config(said), stored)
        if (dialect, name) == (
            "hf",
            "fp8_block",
        ):  # transformers quantizes inputs with FP32 scales, and `notes` says so
            assert {d.where for d in found} == {"input"} and said["notes"]
        else:
            assert found == [], dialect
        if dialect == "modelopt":
            assert departures(plan, read_config({}, said["hf_quant_config"]), stored) == []
    assert num_written >= 2


def test_the_portable_list_has_full_names_experts_without_a_number_and_no_wildcard():
    plan = resolve(preset("mxfp8_last15_bf16"), *qwen_moe())
    names = excluded_names(plan)
    assert "model.layers.3.mlp.experts" in names and "model.layers.3.mlp.experts.1.up_proj" in names
    assert {"model.layers.1.mlp.gate", "lm_head", "model.layers.1.mlp.shared_expert_gate"} <= set(names)
    assert not [n for n in names if "*" in n or n.startswith("re:") or n in ("mlp.gate", "model.layers.3")]
    assert "model.layers.1.self_attn.q_proj" not in names


def test_a_tied_head_is_on_the_list_too():
    assert "lm_head" in excluded_names(resolve(preset("mxfp8"), *qwen_moe(tied=True)))


def test_fault_F2_a_router_as_a_short_name_is_found_in_the_reading_of_one_engine():
    plan = resolve(preset("nvfp4_all"), *qwen_moe())
    said = plan.to("modelopt")["quantization_config"]
    short = ["lm_head", "mlp.gate", "mlp.shared_expert_gate"]
    declared = read_config({"quantization_config": said | {"ignore": short}})
    stored = {t.name: t.sampler_weight for t in plan.tensors.values()}
    found = departures(plan, declared, stored)
    assert {d.where for d in found} == {"vllm-modelopt"}
    assert {d.tensor for d in found} == {f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")}
    assert {(d.planned, d.found) for d in found} == {("nvfp4", "bf16")}


def test_fault_F1_a_head_that_is_not_on_the_list_is_found():
    plan = resolve(preset("mxfp8"), *qwen_moe())
    said = plan.to("modelopt")["quantization_config"]
    declared = read_config({"quantization_config": said | {"ignore": [e for e in said["ignore"] if e != "lm_head"]}})
    found = departures(plan, declared, {t.name: t.sampler_weight for t in plan.tensors.values()})
    assert {(d.tensor, d.planned, d.found) for d in found} == {("lm_head.weight", "bf16", "mxfp8")}


def test_audit_names_what_is_stored_otherwise_what_is_missing_and_what_is_too_much():
    plan = resolve(preset("fp8_block"), *qwen_moe())
    stored = {t.name: t.sampler_weight for t in plan.tensors.values()}
    head, down = "lm_head.weight", "model.layers.0.mlp.down_proj.weight"
    stored |= {head: "fp8_128x128", down: "fp8_128x128_fp32", "stray.weight": None}
    del stored["model.norm.weight"]
    found = departures(plan, read_config(plan.to("deepseek")), stored)
    assert {(d.tensor, d.where, d.planned, d.found) for d in found} == {
        ("model.norm.weight", "stored", "bf16", "missing"),
        (down, "stored", "fp8_128x128", "fp8_128x128_fp32"),
        (head, "stored", "bf16", "fp8_128x128"),
        ("stray.weight", "stored", "nothing", "extra"),
    }


def test_audit_sees_an_input_and_a_cache_in_another_format():
    plan = resolve(preset("fp8_block"), *qwen_moe())
    said = plan.to("deepseek")["quantization_config"]
    assert said["scale_fmt"] == "ue8m0"
    without = {k: v for k, v in said.items() if k != "scale_fmt"}
    stored = {t.name: t.sampler_weight for t in plan.tensors.values()}
    found = departures(plan, read_config({"quantization_config": without}), stored)
    assert {(d.where, d.planned, d.found) for d in found} == {("input", "fp8_1x128", "fp8_1x128_fp32")}
    weight_only = preset("mxfp8").with_rules(
        [Rule(kinds=("linear",), weight="mxfp8", activation=None, backward="dequantized")]
    )
    plan = resolve(weight_only, *qwen_moe())
    said = plan.to("compressed-tensors")["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"] is None
    other = resolve(preset("mxfp8"), *qwen_moe())
    stored = {t.name: t.sampler_weight for t in other.tensors.values()}
    found = departures(other, read_config({"quantization_config": said | {"kv_cache_scheme": {"num_bits": 8}}}), stored)
    assert {d.where for d in found} == {"input", "declared"}
    assert {(d.planned, d.found) for d in found if d.where == "input"} == {("mxfp8", "bf16")}


def test_several_formats_in_one_plan_are_named_module_by_module():
    rules = [Rule(kinds=("routed_expert",), weight="nvfp4", activation="nvfp4_row", backward="dequantized")]
    plan = resolve(preset("mxfp8").with_rules(rules), *qwen_moe())
    stored = {t.name: t.sampler_weight for t in plan.tensors.values()}
    for dialect in ("modelopt", "compressed-tensors"):
        said = plan.to(dialect)
        assert departures(plan, read_config(said), stored) == []
    mixed = plan.to("modelopt")["quantization_config"]
    assert mixed["quant_algo"] == "MIXED_PRECISION"
    assert mixed["quantized_layers"]["model.layers.1.mlp.experts.0.up_proj"] == {
        "quant_algo": "NVFP4",
        "group_size": 16,
    }
    assert modelopt_legacy(mixed)["quantization"]["quantized_layers"] == mixed["quantized_layers"]
    with pytest.raises(RecipeError, match="cannot declare mxfp8"):
        plan.to("deepseek")
    targets = resolve(
        preset("mxfp8").with_rules(
            [Rule(match="layers.0", weight="fp8_row", activation="fp8_row", backward="dequantized")]
        ),
        *qwen_moe(),
    ).to("vllm")
    assert targets["quantization_config"]["targets"]["model.layers.0.self_attn.q_proj"] == "fp8_per_channel"
    assert targets["quantization_config"]["targets"]["model.layers.1.mlp.experts"] == "mxfp8"


def test_a_list_that_an_engine_would_misread_is_refused():
    shapes = qwen_moe()[1] | {"model.mtp.lm_head.weight": (64, 32)}
    config = qwen_moe()[0]
    rule = Rule(match="model.mtp.lm_head", weight="mxfp8", activation="mxfp8", backward="dequantized", opt_in=True)
    plan = resolve(preset("mxfp8").with_rules([rule]), config, shapes)
    with pytest.raises(RecipeError, match=r"vllm-modelopt would keep model\.mtp\.lm_head in BF16, against the plan"):
        plan.to("modelopt")
    assert "model.mtp.lm_head" not in plan.to("compressed-tensors")["quantization_config"]["ignore"]


def test_one_module_of_an_engine_has_one_answer():
    rule = Rule(match="layers.1.mlp.experts.*.down_proj", weight=None, activation=None)
    plan = resolve(preset("mxfp8").with_rules([rule]), *qwen_moe())
    with pytest.raises(RecipeError, match=r"hold model.layers.1.mlp.experts as one module"):
        modules_of(plan)


def test_vllm_gets_its_own_words_for_what_it_quantizes_while_loading():
    plan = resolve(preset("nvfp4_experts"), *qwen_moe())
    said = plan.to("vllm")
    assert said["quantization"] == "online" and said["quantization_config"]["moe"] == "nvfp4_per_token"
    assert "linear" not in said["quantization_config"]
    with pytest.raises(RecipeError, match="convert the checkpoint"):
        resolve(preset("nvfp4_all"), *qwen_moe()).to("vllm")
    assert resolve(preset("bf16"), *qwen_moe()).to("vllm")["quantization"] is None
    mxfp8 = resolve(preset("mxfp8_last15_bf16"), *qwen_moe()).to("vllm")["quantization_config"]
    assert mxfp8["linear"] == mxfp8["moe"] == "mxfp8" and "model.layers.3.mlp.experts" in mxfp8["ignore"]


@pytest.mark.parametrize(
    "name", ["fp8_tensor", "fp8_block", "mxfp8", "mxfp8_last15_bf16", "nvfp4_experts", "nvfp4_all"]
)
def test_megatron_patterns_give_every_module_its_recipe(name):
    plan = resolve(preset(name), *qwen_moe())
    said = plan.to("te")
    matchers = said["megatron"]["te_precision_config_file"]["matchers"].values()
    words = {"mxfp8": "mxfp8", "fp8_tensor": "tensorwise", "fp8_128x128": "blockwise", "nvfp4": "nvfp4", None: "bf16"}
    at = "model.layers"
    for path, tensor in [
        *((f"decoder.layers.{n}.self_attention.linear_qkv", f"{at}.{n}.self_attn.k_proj") for n in range(4)),
        *((f"decoder.layers.{n}.mlp.experts.linear_fc1", f"{at}.{n}.mlp.experts.1.up_proj") for n in (1, 2, 3)),
        *(
            (f"decoder.layers.{n}.mlp.shared_experts.linear_fc2", f"{at}.{n}.mlp.shared_expert.down_proj")
            for n in (1, 3)
        ),
        ("decoder.layers.0.mlp.linear_fc2", f"{at}.0.mlp.down_proj"),
        ("decoder.layers.1.mlp.router", f"{at}.1.mlp.gate"),
        ("output_layer", "lm_head"),
    ]:
        got = next(m["config"] for m in matchers if fnmatchcase(path, m["pattern"]))
        assert got == words[plan[f"{tensor}.weight"].weight], path
    backward = said["environment"].get("NVTE_BACKWARD_OVERRIDE")
    assert backward == (None if name in ("fp8_tensor", "fp8_block") or name.startswith("mxfp8") else "dequantized")
    if name != "mxfp8_last15_bf16":  # numbers of layers are counted per pipeline stage, so none may be in a pattern
        assert not [
            m["pattern"]
            for m in matchers
            if any(c.isdigit() for c in m["pattern"].replace("fc1", "").replace("fc2", ""))
        ]


def test_an_unknown_dialect_and_an_unknown_method_are_refused():
    plan = resolve(preset("mxfp8"), *qwen_moe())
    with pytest.raises(RecipeError, match="did you mean 'sglang'"):
        plan.to("sglnag")
    assert set(READERS) == {"fp8", "mxfp8", "modelopt", "compressed-tensors"}
    with pytest.raises(RecipeError, match="'awq' is not known"):
        read_config({"quantization_config": {"quant_method": "awq"}})


def test_a_modelopt_file_without_inputs_is_weight_only():
    said = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"g": {"weights": {}, "input_activations": None}},
    }
    declared = read_config({"quantization_config": said})
    assert declared is not None and declared.groups[0].activations == (None,)
