"""Our reading of exclusion lists is the engines' own, function against function, on all names of two models."""

from __future__ import annotations

import re
import types

import pytest

from onegrid.errors import RecipeError
from onegrid.recipe import PRESETS, preset, resolve
from onegrid.recipe.dialects.matchers import MATCHERS
from onegrid.recipe.dialects.modules import Module, excluded_names, modules_of
from tests.engines.installed import take
from tests.recipe.models import deepseek_v3, qwen_moe

QUANTIZATION = "model_executor/layers/quantization"
PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}


def vllm_skipped():
    return take("vllm", f"{QUANTIZATION}/utils/quant_utils.py", "is_layer_skipped").is_layer_skipped


def vllm_fp8():
    skipped = vllm_skipped()
    return lambda entries, module: skipped(module.name, entries, PACKED)


def vllm_modelopt():
    names = ("ModelOptQuantConfigBase.is_layer_excluded", "ModelOptQuantConfigBase.apply_vllm_mapper")
    theirs = take("vllm", f"{QUANTIZATION}/modelopt.py", *names, is_layer_skipped=vllm_skipped())

    def excluded(entries, module):
        config = types.SimpleNamespace(exclude_modules=list(entries), packed_modules_mapping=PACKED)
        theirs.apply_vllm_mapper(config, types.SimpleNamespace(apply_list=lambda names: names))
        return theirs.is_layer_excluded(config, module.name)

    return excluded


def vllm_compressed_tensors():
    parts = take("vllm", f"{QUANTIZATION}/utils/config_utils.py", "is_equal_or_regex_match", "find_matching_patterns")
    known = {"find_matching_patterns": parts.find_matching_patterns}
    theirs = take("vllm", f"{QUANTIZATION}/compressed_tensors/utils.py", "should_ignore_layer", **known)

    def ignored(entries, module):
        if module.kind != "experts":
            return theirs.should_ignore_layer(module.name, entries, PACKED)
        answers = {
            theirs.should_ignore_layer(f"{module.name}.0.{n}_proj", entries, PACKED) for n in ("gate", "up", "down")
        }
        if len(answers) > 1:
            raise ValueError("All MoE projections need to have same quantization scheme")
        return answers.pop()

    return ignored


def sglang_skipped():
    names = ("_module_path_match", "_FALLBACK_FUSED_SHARDS", "is_layer_skipped")
    return take("sglang", "srt/layers/quantization/utils.py", *names).is_layer_skipped


def there(module):
    """The name that SGLang has for it."""
    return module.name + ("_with_mqa" if module.name.endswith(".fused_qkv_a_proj") else "")


def sglang_fp8():
    skipped = sglang_skipped()
    theirs = take("sglang", "srt/layers/quantization/fp8.py", "Fp8Config.from_config")

    class Config:
        def __init__(self, **fields):
            self.__dict__ |= fields

        get_from_keys = staticmethod(lambda config, keys: next(config[k] for k in keys if k in config))
        get_from_keys_or = staticmethod(
            lambda config, keys, default: next((config[k] for k in keys if k in config), default)
        )

    def ignored(entries, module):
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": list(entries)}
        config = theirs.from_config(Config, said)
        return skipped(there(module), config.ignored_layers or [], PACKED)

    return ignored


def sglang_modelopt():
    skipped = sglang_skipped()
    names = ("_compile_exclusion_pattern", "ModelOptQuantConfig.is_layer_excluded")
    theirs = take("sglang", "srt/layers/quantization/modelopt_quant.py", *names)

    def excluded(entries, module):
        config = types.SimpleNamespace(exclude_modules=list(entries))
        linear = module.kind != "experts" and skipped(there(module), list(entries), PACKED)
        return linear or theirs.is_layer_excluded(config, there(module))

    return excluded


def transformers_fp8():
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils", reason="needs transformers")

    def excluded(entries, module):
        names = (module.name,) if module.kind == "experts" else module.shards
        answers = {not quantizers.should_convert_module(name, list(entries)) for name in names}
        if len(answers) > 1:
            raise ValueError("shards differ")
        return answers.pop()

    return excluded


THEIRS = {
    "vllm-fp8": vllm_fp8,
    "vllm-modelopt": vllm_modelopt,
    "vllm-compressed-tensors": vllm_compressed_tensors,
    "sglang-fp8": sglang_fp8,
    "sglang-modelopt": sglang_modelopt,
    "transformers-fp8": transformers_fp8,
}


def answer(matcher, entries, module):
    try:
        return bool(matcher(entries, module))
    except (RecipeError, ValueError, re.error):
        return None


def all_modules() -> list[Module]:
    modules = [m for model in (qwen_moe(12), deepseek_v3()) for m in modules_of(resolve(preset("mxfp8"), *model))]
    stray = ("mtp.lm_head", "language_model.model.layers.1.mlp.gate", "model.language_model.layers.1.mlp.gate")
    return modules + [Module(name, "linear", (name,), None, None) for name in stray]


def entry_lists(modules: list[Module]) -> list[list[str]]:
    """Single entries of every spelling, all shards, some shards, the portable lists, the empty list."""
    names = [m.name for m in modules if ".layers.1." in m.name or "layers" not in m.name or ".layers.10." in m.name]
    words = {
        w for n in names for w in (n, n.rpartition(".")[0], n.rpartition(".")[2], ".".join(n.split(".")[-2:])) if w
    }
    stars = {"model.layers.1*", "model.layers.1.*", "*self_attn*", "*mlp.gate", "lm*", "re:.*mlp.gate$", "re:.*up_proj"}
    shards = [list(m.shards) for m in modules[:20]] + [[m.shards[0]] for m in modules[:20]]
    plans = [resolve(PRESETS[n], *model()) for n in PRESETS for model in (qwen_moe, deepseek_v3)]
    return [[w] for w in sorted(words | stars)] + shards + [excluded_names(plan) for plan in plans] + [[]]


@pytest.mark.parametrize("engine", THEIRS)
def test_our_matcher_gives_the_engine_s_answer_for_every_list_and_module(engine):
    theirs = THEIRS[engine]()
    modules = all_modules()
    num_compared = 0
    for entries in entry_lists(modules):
        for module in modules:
            ours = answer(MATCHERS[engine], entries, module)
            assert ours == answer(theirs, entries, module), (entries[:5], module)
            num_compared += 1
    assert num_compared > 5_000


@pytest.mark.parametrize("model", [qwen_moe, deepseek_v3])
@pytest.mark.parametrize("name", [n for n in PRESETS if n != "bf16"])
def test_the_engines_read_every_configuration_of_ours_as_the_plan_means_it(name, model):
    plan = resolve(preset(name), *model())
    readers = {
        "deepseek": ("modules_to_not_convert", ("vllm-fp8", "sglang-fp8", "transformers-fp8")),
        "mxfp8": ("modules_to_not_convert", ("sglang-fp8",)),
        "modelopt": ("ignore", ("vllm-modelopt", "sglang-modelopt")),
        "compressed-tensors": ("ignore", ("vllm-compressed-tensors",)),
    }
    for dialect, (key, engines) in readers.items():
        try:
            entries = plan.to(dialect)["quantization_config"][key]
        except RecipeError:
            continue
        for engine in engines:
            theirs = THEIRS[engine]()
            for module in modules_of(plan):
                assert answer(theirs, entries, module) is (module.weight is None), (dialect, engine, module.name)


def test_megatron_reads_the_precision_file_as_the_plan_means_it():
    names = ("MatchContext", "Matcher", "GlobMatcher", "RecipeConfig")
    import fnmatch
    from abc import ABC, abstractmethod
    from copy import deepcopy
    from dataclasses import dataclass

    quiet = {"log_single_rank": lambda *a: None, "logging": types.SimpleNamespace(INFO=0), "fnmatch": fnmatch}
    known = {"ABC": ABC, "abstractmethod": abstractmethod, "deepcopy": deepcopy, "dataclass": dataclass, **quiet}
    theirs = take("megatron", "core/quantization/quant_config.py", *names, **known)
    plan = resolve(preset("mxfp8_last15_bf16"), *qwen_moe())
    recipe = theirs.RecipeConfig.from_config_dict(plan.to("te")["megatron"]["te_precision_config_file"])
    for layer in range(4):
        for path, tensor in (
            ("self_attention.linear_qkv", "self_attn.v_proj"),
            ("mlp.experts.linear_fc1", "mlp.experts.0.gate_proj"),
            ("mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj"),
        ):
            name = f"model.layers.{layer}.{tensor}.weight"
            if name in plan.tensors:
                context = theirs.MatchContext(f"decoder.layers.{layer}.{path}", layer + 1)
                assert recipe.match_to_config_key(context) == (plan[name].weight or "bf16"), (layer, path)
