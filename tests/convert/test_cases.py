"""Faults that people met when they converted checkpoints, each as the smallest checkpoint that shows it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from onegrid.convert.convert import convert
from onegrid.convert.layouts import layout_for
from onegrid.convert.source import open_source
from onegrid.convert.stored import parts_on_disk, quant_tensor, with_amax
from onegrid.errors import WeightsError
from onegrid.formats import E4M3, QUANTIZERS, dequantize, quantize
from onegrid.formats.casts import decode_elements
from onegrid.model.spec import ModelSpec
from onegrid.model.weights import load_weights, unpack_experts
from onegrid.recipe import PRESETS, preset
from onegrid.recipe.dialects.departures import departures
from tests.bytes import assert_same_bytes
from tests.convert.checkpoints import bf16_model, expected, read_all, write
from tests.model.tiny import transformers_model
from tests.recipe.models import deepseek_v3

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
NVFP4_CT = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
    "ignore": [],
}
LAYER = "model.layers.0.self_attn.o_proj"


def config(quantization, **change):
    return {"num_hidden_layers": 1, "quantization_config": quantization, **change}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fp8_codes(q):
    return q.codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_experts", "fp8_block"])
def test_case_C1_packed_and_single_experts_convert_to_the_same_files(name, tmp_path):
    model = transformers_model("qwen3_moe").bfloat16()  # hidden 32, experts of width 16, layer 0 dense
    model.save_pretrained(tmp_path / "single")
    packed = {n: t.clone() for n, t in model.state_dict().items()}
    assert packed["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    folder = write(tmp_path / "packed", json.loads((tmp_path / "single" / "config.json").read_text()), packed)
    layout = "deepseek" if name == "fp8_block" else "modelopt"
    reports = [convert(tmp_path / f, tmp_path / f"{f}_low", preset(name), layout=layout) for f in ("single", "packed")]
    one, other = read_all(tmp_path / "single_low"), read_all(tmp_path / "packed_low")
    assert one.keys() == other.keys()
    for key in one:
        assert_same_bytes(one[key], other[key], key)
    assert {k for k in reports[1].dropped if "experts" in k} == {k for k in packed if "experts" in k}
    scale = "weight_scale_inv" if name == "fp8_block" else "weight_scale"
    assert sum(key.endswith(f"down_proj.{scale}") and ".experts." in key for key in one) == 4
    weights = unpack_experts(packed)
    convert(tmp_path / "packed_low", tmp_path / "back", PRESETS["bf16"])
    back = load_weights(tmp_path / "back", ModelSpec.from_hf_config(json.loads((folder / "config.json").read_text())))
    for tensor, value in back.items():
        assert_same_bytes(value, expected(weights, reports[0].plan, tensor), tensor)


def test_packed_fp8_experts_are_taken_apart_with_their_scales(tmp_path):
    at = "model.layers.0.mlp.experts"
    experts = {f"{at}.{e}.{n}_proj.weight": random(128, 64, seed=e) for e in range(2) for n in ("gate", "up")}
    quantizer = QUANTIZERS["fp8_128x128_fp32"]
    q = {n: quantize(w, quantizer) for n, w in experts.items()}

    def packed(of):
        pairs = [[of(q[f"{at}.{e}.{n}_proj.weight"]) for n in ("gate", "up")] for e in range(2)]
        return torch.stack([torch.cat(pair) for pair in pairs])

    raw = {f"{at}.gate_up_proj": packed(fp8_codes), f"{at}.gate_up_proj_scale_inv": packed(lambda x: x.scales)}
    source = open_source(write(tmp_path / "packed", config(FP8), raw))
    for name in experts:
        assert_same_bytes(source.values(name), dequantize(q[name], torch.bfloat16), name)
    del raw[f"{at}.gate_up_proj_scale_inv"]
    with pytest.raises(WeightsError, match="gate_up_proj_scale_inv is not in the checkpoint"):
        open_source(write(tmp_path / "none", config(FP8), raw))


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_case_C2_a_scale_in_another_shard_is_found_and_edge_blocks_count(suffix, tmp_path):
    x = random(200, 130)
    q = quantize(x, QUANTIZERS["fp8_128x128_fp32"])
    assert q.scales.shape == (2, 2)
    first, second = {f"{LAYER}.weight": fp8_codes(q)}, {f"{LAYER}.{suffix}": q.scales}
    write(tmp_path / "split", config(FP8), first, second)
    report = convert(tmp_path / "split", tmp_path / "back", PRESETS["bf16"])
    assert_same_bytes(read_all(tmp_path / "back")[f"{LAYER}.weight"], dequantize(q, torch.bfloat16))
    assert report.dropped == {f"{LAYER}.{suffix}": f"in {LAYER}.weight"}


def test_case_C2_missing_unused_and_doubled_scales_are_errors_that_name_them(tmp_path):
    q = quantize(random(64, 64), QUANTIZERS["fp8_128x128_fp32"])
    codes, scales = fp8_codes(q), q.scales
    plain = {"model.norm.weight": random(64, 1)[:, 0]}
    for i, (raw, message) in enumerate(
        [
            (
                {f"{LAYER}.weight": codes},
                rf"{LAYER}.weight is F8_E4M3 and has no scale: none of {LAYER}.weight_scale_inv",
            ),
            (
                plain | {f"{LAYER}.weight_scale_inv": scales},
                "weight_scale_inv is a scale that nothing uses: there is no weight",
            ),
            (
                {f"{LAYER}.weight": random(64, 64), f"{LAYER}.weight_scale": scales},
                f"nothing uses: {LAYER}.weight is BF16",
            ),
            (
                {f"{LAYER}.weight": codes, f"{LAYER}.weight_scale": scales, f"{LAYER}.scale": scales.clone()},
                "has 2 scales",
            ),
            (
                {f"{LAYER}.weight": codes, f"{LAYER}.scale": scales, f"{LAYER}.weight_scale_2": scales[0, 0].clone()},
                "no global",
            ),
        ]
    ):
        folder = write(tmp_path / str(i), config(FP8), raw)
        with pytest.raises(WeightsError, match=message):
            convert(folder, tmp_path / "out", PRESETS["bf16"])
        assert not (tmp_path / "out").exists()


def test_case_C4_gate_and_up_keep_their_places(tmp_path):
    at = "model.layers.0.mlp"
    gate_up = {f"{at}.gate_proj.weight": torch.ones(4, 32), f"{at}.up_proj.weight": torch.full((4, 32), 2.0)}
    experts = torch.cat([torch.ones(2, 4, 32), torch.full((2, 4, 32), 2.0)], dim=1)
    raw = gate_up | {"model.layers.0.mlp.experts.gate_up_proj": experts}
    raw = {n: t.bfloat16() for n, t in raw.items()} | {
        f"{at}.experts.down_proj": torch.full((2, 32, 4), 3.0).bfloat16()
    }
    source = write(tmp_path / "bf16", {"num_hidden_layers": 1}, raw)
    for layout, name in (("modelopt", "nvfp4_all"), ("compressed-tensors", "nvfp4_all"), ("modelopt", "mxfp8")):
        convert(source, tmp_path / f"{layout}{name}", preset(name), layout=layout)
        back = tmp_path / f"{layout}{name}back"
        convert(tmp_path / f"{layout}{name}", back, PRESETS["bf16"])
        for key, value in read_all(back).items():
            wanted = 1.0 if "gate_proj" in key else 2.0 if "up_proj" in key else 3.0
            assert bool((value == wanted).all()), key


def test_case_C6_scales_in_bf16_are_taken_as_they_are_and_fp32_scales_stay_fp32(tmp_path):
    q = quantize(random(64, 64), QUANTIZERS["fp8_128x128_fp32"])
    rounded = q.scales.bfloat16()
    write(tmp_path / "bf16_scale", config(FP8), {f"{LAYER}.weight": fp8_codes(q), f"{LAYER}.weight_scale_inv": rounded})
    stored = open_source(tmp_path / "bf16_scale").read(f"{LAYER}.weight")
    assert_same_bytes(stored.scales, rounded.float())
    x = bf16_model(tmp_path / "model")
    assert x
    convert(tmp_path / "model", tmp_path / "low", preset("fp8_block"), layout="deepseek")
    assert {t.dtype for n, t in read_all(tmp_path / "low").items() if "scale" in n} == {torch.float32}


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_case_Q12_fused_weights_get_one_global_scale(layout, tmp_path):
    weights = bf16_model(tmp_path / "bf16", "moe")
    convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_all"), layout=layout)
    tensors = read_all(tmp_path / "low")
    suffix = "weight_scale_2" if layout == "modelopt" else "weight_global_scale"

    def scale(name):
        return float(tensors[f"{name}.{suffix}"])

    layer = "model.layers.1"
    for group in (
        [f"{layer}.self_attn.{n}_proj" for n in "qkv"],
        *([f"{layer}.mlp.experts.{e}.{n}_proj" for n in ("gate", "up")] for e in range(4)),
    ):
        assert len({scale(name) for name in group}) == 1
        largest = max(float(weights[f"{name}.weight"].abs().max()) for name in group)
        factor = scale(group[0]) if layout == "modelopt" else 1 / scale(group[0])
        assert factor == pytest.approx(largest / 2688, rel=2**-22)
    assert len({scale(f"{layer}.mlp.experts.{e}.gate_proj") for e in range(4)}) == 4


def test_case_Q12_own_global_scales_are_brought_to_the_larger_one_within_a_step_of_e4m3():
    codes = torch.full((1, 8), 0x22, dtype=torch.uint8)  # payload 1.0
    block = torch.tensor([[4.0]]).to(torch.float8_e4m3fn)
    gate, up = (
        quant_tensor("w", QUANTIZERS["nvfp4"], codes, block, torch.tensor(number), sense="multiplier")
        for number in (1.0, 0.5)
    )
    assert with_amax(gate, gate.amax) is gate
    moved = with_amax(up, gate.amax)
    assert_same_bytes(moved.codes, up.codes)
    assert float(decode_elements(moved.scales, E4M3)) == 2.0
    assert_same_bytes(dequantize(moved), torch.full((1, 16), 2.0))
    assert_same_bytes(dequantize(gate), torch.full((1, 16), 4.0))


def test_case_Q12_a_checkpoint_with_unequal_halves_is_mended(tmp_path):
    at, raw, q = "model.layers.0.mlp", {}, {}
    for name, spread in (("gate", 1.0), ("up", 0.8)):
        q[name] = quantize(random(32, 64, seed=7) * spread, QUANTIZERS["nvfp4"])
        raw |= {
            f"{at}.{name}_proj.weight": q[name].codes,
            f"{at}.{name}_proj.weight_scale": q[name].scales.view(torch.float8_e4m3fn),
            f"{at}.{name}_proj.weight_scale_2": q[name].factor,
            f"{at}.{name}_proj.input_scale": torch.tensor(0.25),
        }
    source = write(tmp_path / "unequal", config(NVFP4_MODELOPT), raw)
    convert(source, tmp_path / "low", preset("nvfp4_all"), layout="modelopt")
    low = read_all(tmp_path / "low")
    assert_same_bytes(low[f"{at}.up_proj.weight_scale_2"], low[f"{at}.gate_proj.weight_scale_2"])
    assert_same_bytes(low[f"{at}.gate_proj.weight_scale"], raw[f"{at}.gate_proj.weight_scale"])
    assert float(low[f"{at}.up_proj.input_scale"]) == 0.25
    up, before = open_source(tmp_path / "low").values(f"{at}.up_proj.weight").float(), dequantize(q["up"])
    # a block scale is rounded once more to 3 bits of mantissa: half a step is 2^-4, BF16 adds 2^-9
    assert bool(((up - before).abs() <= before.abs() * (2**-4 + 2**-8)).all())


@pytest.mark.parametrize("name", ["nvfp4_all", "mxfp4", "mxfp8", "fp8_row", "fp8_tensor", "fp8_block"])
def test_case_Q13_every_layout_reads_to_the_same_numbers(name, tmp_path):
    x = random(16, 32) * 300
    write(tmp_path / "bf16", {"num_hidden_layers": 1}, {f"{LAYER}.weight": x})
    found = {}
    for layout in ("modelopt", "sglang", "compressed-tensors", "deepseek"):
        try:
            convert(tmp_path / "bf16", tmp_path / layout, preset(name), layout=layout)
        except Exception as error:
            assert "cannot declare" in str(error)
            continue
        found[layout] = open_source(tmp_path / layout).values(f"{LAYER}.weight")
    first = found.pop("compressed-tensors")
    for value in found.values():
        assert_same_bytes(value, first)
    # half a step of E2M1 is at most 1 of 6, of E4M3 2^-4 of a value; rounding the scale adds 2^-4 of it
    worst = (1 / 6 if "4" in name else 2**-4) * (1 + 2**-4) + (2**-4 if name == "nvfp4_all" else 0)
    assert float((first.float() - x.float()).abs().max()) <= worst * float(x.abs().max())


def test_case_Q13_a_divisor_is_not_a_multiplier(tmp_path):
    codes = torch.full((16, 16), 0x22, dtype=torch.uint8)
    scales = torch.ones(16, 2).to(torch.float8_e4m3fn)
    number = torch.tensor([3584.0])
    packed = {f"{LAYER}.weight_packed": codes, f"{LAYER}.weight_scale": scales, f"{LAYER}.weight_global_scale": number}
    divisor = open_source(write(tmp_path / "ct", config(NVFP4_CT), packed)).values(f"{LAYER}.weight")
    assert float(divisor.unique()) == pytest.approx(1 / 3584, rel=2**-8)
    raw = {
        f"{LAYER}.weight": codes,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_scale_2": (1 / number)[0].clone(),
    }
    multiplier = open_source(write(tmp_path / "mo", config(NVFP4_MODELOPT), raw)).values(f"{LAYER}.weight")
    assert_same_bytes(multiplier, divisor)


def test_case_Q14_every_expert_keeps_its_own_global_scale_and_none_may_be_absent(tmp_path):
    at, raw, wanted = "model.layers.0.mlp.experts", {}, {}
    for expert, number in ((0, 0.25), (1, 4.0)):
        for n in ("gate", "up", "down"):
            stem = f"{at}.{expert}.{n}_proj"
            raw[f"{stem}.weight"] = torch.full((16, 16), 0x44, dtype=torch.uint8)  # payload 2.0
            raw[f"{stem}.weight_scale"] = torch.full((16, 2), 0.5).to(torch.float8_e4m3fn)
            raw[f"{stem}.weight_scale_2"] = torch.tensor(number)
            wanted[f"{stem}.weight"] = number
    folder = write(tmp_path / "experts", config(NVFP4_MODELOPT), raw)
    convert(folder, tmp_path / "back", PRESETS["bf16"])
    for key, value in read_all(tmp_path / "back").items():
        assert float(value.unique()) == wanted[key], key
    del raw[f"{at}.1.down_proj.weight_scale_2"]
    with pytest.raises(WeightsError, match=rf"{at}.1.down_proj.weight is in nvfp4, which needs one global scale"):
        open_source(write(tmp_path / "absent", config(NVFP4_MODELOPT), raw))


def test_case_R3_and_R9_a_reloaded_configuration_decides_every_tensor_as_it_is_stored(tmp_path):
    bf16_model(tmp_path / "bf16", "moe")
    for layout in ("modelopt", "compressed-tensors", "sglang"):
        report = convert(tmp_path / "bf16", tmp_path / layout, preset("mxfp8"), layout=layout)
        source = open_source(tmp_path / layout)
        assert departures(report.plan, source.declared, source.stored_quantizers()) == []
        assert source.stored_quantizers()["model.layers.1.mlp.gate.weight"] is None
        assert source.stored_quantizers()["model.layers.0.mlp.gate_proj.weight"] == "mxfp8"


def test_case_R7_a_tied_head_is_left_out_only_if_it_is_the_embedding(tmp_path):
    weights = bf16_model(tmp_path / "tied", tie_word_embeddings=True)
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, tmp_path / "tied" / "model.safetensors")
    report = convert(tmp_path / "tied", tmp_path / "low", preset("mxfp8"), layout="modelopt")
    assert report.dropped == {"lm_head.weight": "tied to model.embed_tokens.weight, with the same numbers"}
    assert "lm_head" in json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]["ignore"]
    save_file(weights | {"lm_head.weight": -head}, tmp_path / "tied" / "model.safetensors")
    with pytest.raises(WeightsError, match="holds two different tensors"):
        convert(tmp_path / "tied", tmp_path / "other", preset("mxfp8"), layout="modelopt")


def test_heads_beyond_the_model_are_kept_and_listed(tmp_path):
    weights = bf16_model(tmp_path / "bf16")
    extra = {
        f"model.layers.2.{n}": random(64, 64, seed=i) for i, n in enumerate(["eh_proj.weight", "mlp.down_proj.weight"])
    }
    save_file(weights | extra, tmp_path / "bf16" / "model.safetensors")
    report = convert(tmp_path / "bf16", tmp_path / "low", preset("mxfp8"), layout="sglang")
    assert set(report.extra) == extra.keys()
    low = read_all(tmp_path / "low")
    for name, value in extra.items():
        assert_same_bytes(low[name], value, name)
    assert not report.dropped  # every key of the source has its namesake


def test_a_global_scale_gives_back_the_amax_of_every_bf16_weight():
    rows = [layout_for(layout, "nvfp4", "nvfp4_row") for layout in ("modelopt", "compressed-tensors")]
    bits = [*range(0x3C80, 0x3D00), 0x3001, 0x4777, 0x2013]  # every significand, and some exponents
    for value in torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16):
        q = quantize(torch.full((1, 16), float(value)), QUANTIZERS["nvfp4"])
        for row in rows:
            parts = parts_on_disk(q, row)
            number = parts[str(row.global_scale)]
            back = quant_tensor("w", q.quantizer, parts[row.codes], parts[row.scales], number, sense=row.sense)
            assert_same_bytes(back.amax, q.amax)


def test_weights_with_bf16_inputs_have_no_scale_of_inputs():
    """vLLM has no parameter for one then, and refuses the checkpoint."""
    assert layout_for("compressed-tensors", "nvfp4", "nvfp4_row").input_scale == "input_global_scale"
    row = layout_for("compressed-tensors", "nvfp4", None)
    q = quantize(torch.randn(32, 64).bfloat16(), QUANTIZERS["nvfp4"])
    assert set(parts_on_disk(with_amax(q, q.amax), row)) == {"weight_packed", "weight_scale", "weight_global_scale"}


def test_a_deepseek_checkpoint_with_latent_attention_and_extra_layer_converts_whole(tmp_path):
    settings, shapes = deepseek_v3(1)
    raw = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if name.endswith("_scale_inv"):
            continue
        x = random(*shape, seed=i) if len(shape) == 2 else torch.ones(shape).bfloat16()
        if f"{name}_scale_inv" in shapes:
            q = quantize(x, QUANTIZERS["fp8_128x128"])
            raw |= {name: fp8_codes(q), f"{name}_scale_inv": q.scales}
        else:
            raw[name] = x
    folder = write(tmp_path / "fp8", settings | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, raw)
    report = convert(folder, tmp_path / "low", preset("mxfp8"), layout="compressed-tensors")
    low = read_all(tmp_path / "low")
    at = "model.layers.0.self_attn"
    assert_same_bytes(low[f"{at}.q_a_proj.weight"], raw[f"{at}.q_a_proj.weight"])
    assert low[f"{at}.q_a_proj.weight_scale"].dtype == torch.uint8
    assert low[f"{at}.kv_b_proj.weight"].dtype == torch.bfloat16  # its contraction axis changes where it is absorbed
    assert (
        f"{at}.kv_b_proj" in json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]["ignore"]
    )
    assert (
        "model.layers.1.eh_proj.weight" in report.extra
        and "model.layers.1.mlp.experts.1.up_proj.weight" in report.extra
    )
    assert raw.keys() - low.keys() == report.dropped.keys()


def test_fused_latent_projections_share_a_global_scale_too(tmp_path):
    settings, shapes = deepseek_v3(1)
    raw = {n: random(*s, seed=i) for i, (n, s) in enumerate(shapes.items()) if len(s) == 2 and "_scale_inv" not in n}
    write(tmp_path / "bf16", settings, raw)
    convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_all"), layout="modelopt")
    low = read_all(tmp_path / "low")
    at = "model.layers.0.self_attn"
    one, other = (low[f"{at}.{n}.weight_scale_2"] for n in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert_same_bytes(one, other)


@pytest.mark.parametrize(
    ("first", "layout", "then"), [("fp8_row", "modelopt", "mxfp8"), ("mxfp8", "sglang", "nvfp4_all")]
)
def test_from_one_format_to_another_the_decoded_bf16_weights_are_quantized(first, layout, then, tmp_path):
    bf16_model(tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "first", preset(first), layout=layout)
    convert(tmp_path / "first", tmp_path / "second", preset(then), layout="compressed-tensors")
    convert(tmp_path / "first", tmp_path / "back", PRESETS["bf16"])
    convert(tmp_path / "back", tmp_path / "through_bf16", preset(then), layout="compressed-tensors")
    second, through = read_all(tmp_path / "second"), read_all(tmp_path / "through_bf16")
    assert second.keys() == through.keys()
    for key in second:
        assert_same_bytes(second[key], through[key], key)
