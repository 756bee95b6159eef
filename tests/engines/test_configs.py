"""The engines' own parsers take our configurations, and read the format, the exclusions and the cache out of them."""

from __future__ import annotations

import json
import types

import pytest
import torch

from onegrid.convert.convert import convert
from onegrid.errors import RecipeError
from onegrid.recipe import PRESETS, Rule, preset, resolve
from tests.convert.checkpoints import bf16_model, expected, read_all
from tests.engines.installed import folder_of, take
from tests.recipe.models import deepseek_v3, qwen_moe

QUANTIZATION = "model_executor/layers/quantization"
MIXED = [Rule(kinds=("routed_expert",), weight="nvfp4", activation="nvfp4_row", backward="dequantized")]


def get(config, keys):
    return next(config[key] for key in keys if key in config)


def plans():
    made = [resolve(preset(name), *model()) for name in PRESETS for model in (qwen_moe, deepseek_v3)]
    return [*made, resolve(preset("mxfp8").with_rules(MIXED), *qwen_moe())]


def test_vllm_parses_both_forms_of_modelopt_alike():
    algos = take("vllm", f"{QUANTIZATION}/modelopt.py", "LINEAR_ALGOS").LINEAR_ALGOS
    theirs = take(
        "vllm",
        f"{QUANTIZATION}/modelopt.py",
        "ModelOptQuantConfigBase.from_config",
        QUANT_ALGOS=[*algos, "MIXED_PRECISION"],
    )
    parser = types.SimpleNamespace(get_from_keys=get, _from_config=lambda **fields: fields)
    num_read = 0
    for plan in plans():
        try:
            said = json.loads(json.dumps(plan.to("modelopt")))
        except RecipeError:
            continue
        flat, nested = (theirs.from_config(parser, said[k]) for k in ("quantization_config", "hf_quant_config"))
        for key in ("quant_method", "exclude_modules", "kv_cache_quant_method", "group_size"):
            assert flat[key] == nested[key], key
        assert flat["quant_method"] == said["quantization_config"]["quant_algo"]
        assert flat["exclude_modules"] == said["quantization_config"]["ignore"]
        num_read += 1
    assert num_read > 10


def test_vllm_finds_the_format_of_every_module_of_a_mixed_plan():
    names = ("_resolve_quant_algo", "_quantized_layer_prefix_candidates")
    theirs = take("vllm", f"{QUANTIZATION}/modelopt.py", *(f"ModelOptMixedPrecisionConfig.{n}" for n in names))
    plan = resolve(preset("mxfp8").with_rules(MIXED), *qwen_moe())
    config = types.SimpleNamespace(
        quantized_layers=plan.to("modelopt")["quantization_config"]["quantized_layers"],
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
        _quantized_layer_prefix_candidates=theirs._quantized_layer_prefix_candidates,
    )
    from onegrid.recipe.dialects.modules import modules_of

    words = {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}
    for module in modules_of(plan):
        if module.weight is not None:
            assert theirs._resolve_quant_algo(config, module.name) == words[module.weight], module.name


def test_sglang_parses_modelopt_nvfp4_in_both_forms():
    theirs = take(
        "sglang",
        "srt/layers/quantization/modelopt_quant.py",
        "ModelOptFp4Config.from_config",
        "ModelOptFp4Config.common_group_size",
    )
    fields = ("serialized", "kv_cache", "group_size", "exclude_modules", "packed", "is_awq", "use_per_token_activation")

    class Config(types.SimpleNamespace):
        get_from_keys = staticmethod(get)

        def __init__(self, *args, **kwargs):
            super().__init__(**dict(zip(fields, args, strict=False)), **kwargs)

    group_size = {"ModelOptFp4Config": types.SimpleNamespace(common_group_size=theirs.common_group_size)}
    theirs = take("sglang", "srt/layers/quantization/modelopt_quant.py", "ModelOptFp4Config.from_config", **group_size)
    for name in ("nvfp4_experts", "nvfp4_all"):
        said = resolve(preset(name), *qwen_moe()).to("modelopt")
        for key, excluded in (("quantization_config", "ignore"), ("hf_quant_config", None)):
            config = theirs.from_config(Config, said[key])
            wanted = said[key][excluded] if excluded else said[key]["quantization"]["exclude_modules"]
            assert config.serialized and config.group_size == 16 and config.exclude_modules == wanted


def compressed_tensors():
    folder_of("compressed_tensors")
    return pytest.importorskip("compressed_tensors", reason="needs compressed-tensors with its dependencies")


@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors_validates_every_configuration_and_matches_modules_by_it():
    compressed_tensors()
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match

    linear = torch.nn.Linear(1, 1)
    for plan in plans():
        try:
            said = plan.to("compressed-tensors")["quantization_config"]
        except RecipeError:
            continue
        config = QuantizationConfig.model_validate(json.loads(json.dumps(said)))
        for name, planned in plan.tensors.items():
            stem = name.removesuffix(".weight")
            if len(planned.shape) != 2 or planned.kind in ("embedding", "norm") or not name.endswith(".weight"):
                continue
            ignored = any(is_match(stem, linear, entry) for entry in config.ignore or [])
            targeted = any(is_match(stem, linear, t) for g in config.config_groups.values() for t in g.targets)
            assert (targeted and not ignored) == (planned.sampler_weight is not None), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("nvfp4_all", False),
        ("mxfp4", True),
        ("mxfp8", True),
        ("fp8_block", True),
        ("fp8_row", False),
        ("fp8_tensor", False),
    ],
)
def test_compressed_tensors_decodes_what_we_write(name, exact, tmp_path):
    compressed_tensors()
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weights = bf16_model(tmp_path / "bf16")
    report = convert(tmp_path / "bf16", tmp_path / "low", preset(name), layout="compressed-tensors")
    said = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    scheme = next(iter(QuantizationConfig.model_validate(said).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    tensors = read_all(tmp_path / "low")
    num_compared = 0
    for tensor, planned in report.plan.tensors.items():
        if planned.sampler_weight is None:
            continue
        stem = tensor.removesuffix("weight")
        raw = {key.removeprefix(stem): value for key, value in tensors.items() if key.startswith(stem)}
        got = compressor.decompress(raw, scheme)["weight"].float()
        wanted = expected(weights, report.plan, tensor).float()
        if exact:
            assert torch.equal(got, wanted), tensor
        else:  # they round scale over global scale, or the product, to BF16: twice half a step of 2^-8
            assert bool(((got - wanted).abs() <= wanted.abs() * 2**-7).all()), tensor
        num_compared += 1
    assert num_compared == 14
