"""BF16 to a layout and back is what the formats say, in every layout that can hold the recipe."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from onegrid.convert.convert import convert
from onegrid.errors import RecipeError
from onegrid.formats import QUANTIZERS
from onegrid.recipe import PRESETS, Rule, preset
from tests.bytes import assert_same_bytes
from tests.convert.checkpoints import bf16_model, expected, files_of, read_all

LAYOUTS = ("modelopt", "sglang", "compressed-tensors", "deepseek")
HOLDS = {
    "fp8_tensor": {"modelopt", "compressed-tensors", "deepseek"},
    "fp8_row": {"modelopt", "compressed-tensors"},
    "fp8_block": {"modelopt", "compressed-tensors", "deepseek"},
    "mxfp8": {"modelopt", "sglang", "compressed-tensors"},
    "mxfp8_last15_bf16": {"modelopt", "sglang", "compressed-tensors"},
    "nvfp4_experts": {"modelopt", "compressed-tensors"},
    "nvfp4_all": {"modelopt", "compressed-tensors"},
    "mxfp4": {"compressed-tensors"},
}


def pairs(kind):
    return [(n, layout) for n in HOLDS for layout in LAYOUTS if kind == "moe" or n != "nvfp4_experts"]


@pytest.mark.parametrize(("kind", "name", "layout"), [(k, *p) for k in ("dense", "moe") for p in pairs(k)])
def test_bf16_to_a_layout_and_back_is_quantizing_and_decoding(kind, name, layout, tmp_path):
    weights = bf16_model(tmp_path / "bf16", kind)
    if layout not in HOLDS[name]:
        with pytest.raises(RecipeError, match="cannot declare"):
            convert(tmp_path / "bf16", tmp_path / "low", preset(name), layout=layout)
        assert not (tmp_path / "low").exists()
        return
    report = convert(tmp_path / "bf16", tmp_path / "low", preset(name), layout=layout)
    assert not report.dropped or all(reason.startswith("in ") for reason in report.dropped.values())
    convert(tmp_path / "low", tmp_path / "back", PRESETS["bf16"])
    back = read_all(tmp_path / "back")
    assert back.keys() == weights.keys()
    assert any(t.sampler_weight for t in report.plan.tensors.values())
    for tensor in weights:
        assert_same_bytes(back[tensor], expected(weights, report.plan, tensor), tensor)


@pytest.mark.parametrize("weight", ["mxfp8_2d", "nvfp4_2d", "fp8_128x128_fp32", "fp8_tensor_pow2", "fp8_row_pow2"])
def test_other_quantizers_come_back_as_well(weight, tmp_path):
    weights = bf16_model(tmp_path / "bf16")
    activation = {"mxfp8_2d": "mxfp8", "nvfp4_2d": "nvfp4", "fp8_128x128_fp32": "fp8_1x128_fp32"}.get(weight, weight)
    rule = Rule(kinds=("linear",), weight=weight, activation=activation, backward="dequantized")
    recipe = dataclasses.replace(preset("bf16"), rules=(rule, *preset("bf16").rules))
    report = convert(tmp_path / "bf16", tmp_path / "low", recipe, layout="compressed-tensors")
    convert(tmp_path / "low", tmp_path / "back", PRESETS["bf16"])
    for tensor, value in read_all(tmp_path / "back").items():
        assert_same_bytes(value, expected(weights, report.plan, tensor), tensor)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("nvfp4_all", "modelopt", "compressed-tensors"),
        ("nvfp4_all", "compressed-tensors", "modelopt"),
        ("mxfp8", "sglang", "modelopt"),
        ("mxfp8", "modelopt", "compressed-tensors"),
        ("fp8_block", "deepseek", "compressed-tensors"),
        ("fp8_block", "deepseek", "modelopt"),
        ("fp8_row", "modelopt", "compressed-tensors"),
        ("fp8_tensor", "deepseek", "modelopt"),
    ],
)
def test_between_two_layouts_of_one_format_no_byte_is_quantized_again(name, first, then, tmp_path):
    bf16_model(tmp_path / "bf16", "moe")
    convert(tmp_path / "bf16", tmp_path / "first", preset(name), layout=first)
    convert(tmp_path / "first", tmp_path / "second", preset(name), layout=then)
    convert(tmp_path / "bf16", tmp_path / "direct", preset(name), layout=then)
    second, direct = read_all(tmp_path / "second"), read_all(tmp_path / "direct")
    assert second.keys() == direct.keys()
    for key in direct:
        assert_same_bytes(second[key], direct[key], key)


def test_fp8_blocks_with_power_of_two_scales_become_mxfp8_without_quantizing_again(tmp_path):
    bf16_model(tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "fp8", preset("fp8_block"), layout="deepseek")
    convert(tmp_path / "fp8", tmp_path / "mxfp8", preset("mxfp8"), layout="sglang")
    fp8, mxfp8 = read_all(tmp_path / "fp8"), read_all(tmp_path / "mxfp8")
    at = "model.layers.0.mlp.gate_proj"
    assert_same_bytes(mxfp8[f"{at}.weight"], fp8[f"{at}.weight"])
    assert mxfp8[f"{at}.weight_scale_inv"].shape == (96, 2)
    exponent = int(mxfp8[f"{at}.weight_scale_inv"].unique())
    assert float(fp8[f"{at}.weight_scale_inv"]) == 2.0 ** (exponent - 127)
    for folder in ("fp8", "mxfp8"):
        convert(tmp_path / folder, tmp_path / f"{folder}_back", PRESETS["bf16"])
    one, other = read_all(tmp_path / "fp8_back"), read_all(tmp_path / "mxfp8_back")
    for name in one:
        assert_same_bytes(one[name], other[name], name)


def test_case_C7_what_is_stored_is_what_the_configuration_and_the_plan_say(tmp_path):
    bf16_model(tmp_path / "bf16", "moe")
    report = convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_experts"), layout="modelopt")
    tensors = read_all(tmp_path / "low")
    for name, planned in report.plan.tensors.items():
        dtype = torch.uint8 if planned.sampler_weight else torch.bfloat16
        assert tensors[name].dtype == dtype, name
    record = json.loads((tmp_path / "low" / "conversion.json").read_text())
    assert record["plan_digest"] == report.plan.digest and record["quantized"] == {"nvfp4": 12}
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    nested = json.loads((tmp_path / "low" / "hf_quant_config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == nested["quantization"]["quant_algo"] == "NVFP4"
    assert config["quantization_config"]["ignore"] == nested["quantization"]["exclude_modules"]


def test_bytes_do_not_depend_on_how_the_source_is_split(tmp_path):
    bf16_model(tmp_path / "one", "moe")
    bf16_model(tmp_path / "many", "moe", max_shard_bytes=9_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    scattered(tmp_path / "one", tmp_path / "scattered")
    for source in ("one", "many", "scattered"):
        convert(tmp_path / source, tmp_path / f"{source}_low", preset("nvfp4_all"), layout="modelopt")
    before = torch.get_num_threads()
    convert(tmp_path / "many", tmp_path / "single_thread", preset("nvfp4_all"), layout="modelopt", threads=1)
    assert torch.get_num_threads() == before
    one = files_of(tmp_path / "one_low")
    assert files_of(tmp_path / "many_low") == one == files_of(tmp_path / "single_thread")
    assert files_of(tmp_path / "scattered_low") == one


def scattered(source, target):
    """The same checkpoint with its tensors from the last to the first, dealt out to three files, in an index that lists
    them so: gate and up of an expert lie apart, and no file is in the order of layers."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_all(source)
    names = sorted(tensors, reverse=True)
    file_of = {name: f"model-0000{(2, 3, 1)[i % 3]}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, target / file, {"format": "pt"})
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def test_float_sources_are_rounded_to_bf16_before_they_are_quantized(tmp_path):
    from tests.convert.checkpoints import write

    config = {"num_hidden_layers": 1}
    wide = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16):
        x = wide.to(dtype)
        write(tmp_path / str(dtype), config, {"model.layers.0.self_attn.o_proj.weight": x})
        convert(tmp_path / str(dtype), tmp_path / f"{dtype}_low", preset("mxfp8"), layout="modelopt")
        from onegrid.formats import quantize

        q = quantize(x.bfloat16(), QUANTIZERS["mxfp8"])
        got = read_all(tmp_path / f"{dtype}_low")
        assert_same_bytes(got["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8), q.codes)
        assert_same_bytes(got["model.layers.0.self_attn.o_proj.weight_scale"], q.scales)
