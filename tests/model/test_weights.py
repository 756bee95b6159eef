"""Checkpoints come in whole and by name, and go out so that nothing is lost."""

from __future__ import annotations

import json
import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onegrid.errors import CheckpointError, NonFiniteError, WeightsError
from onegrid.formats import QUANTIZERS, dequantize, quantize
from onegrid.model.spec import FAMILIES, ModelSpec, tensor_shapes
from onegrid.model.weights import load_weights, pack_experts, read_index, save_weights, unpack_experts
from onegrid.recipe import PRESETS, resolve
from tests.bytes import assert_same_bytes
from tests.model.tiny import config_of, transformers_model

SHARD_BYTES = 16_000


def tiny(family: str = "qwen3_moe", **change) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """A spec and random BF16 weights."""
    spec = ModelSpec.from_hf_config(config_of(family, **change))
    generator = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(s, generator=generator).bfloat16() for n, s in tensor_shapes(spec).items()}
    return spec, weights


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        assert_same_bytes(actual[name], expected[name], name)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_loaded_and_what_is_saved_transformers_loads(family, tied, tmp_path):
    from transformers import AutoModelForCausalLM

    model = transformers_model(family, tie_word_embeddings=tied).bfloat16()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    spec = ModelSpec.from_hf_config(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    weights = load_weights(tmp_path / "theirs", spec)
    expected = unpack_experts(model.state_dict())
    assert_same_tensors(weights, {n: expected[n] for n in tensor_shapes(spec)})
    save_weights(weights, spec, tmp_path / "ours", max_shard_bytes=SHARD_BYTES)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))


def test_case_C1_packed_and_single_experts_are_the_same_weights(tmp_path):
    model = transformers_model("qwen3_moe")  # hidden 32, 4 experts of width 16, layer 0 dense
    state = model.state_dict()
    at = "model.layers.1.mlp.experts"
    assert {n: tuple(t.shape) for n, t in state.items() if "experts" in n} == {
        f"{at}.gate_up_proj": (4, 32, 32),
        f"{at}.down_proj": (4, 32, 16),
    }
    model.save_pretrained(tmp_path / "single")
    save_file({n: t.clone() for n, t in state.items()}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "single" / "model.safetensors", framework="pt") as file:
        assert sum("experts" in n for n in file.keys()) == 12  # noqa: SIM118
    spec = ModelSpec.from_hf_config(model.config.to_dict())
    single, packed = (load_weights(folder, spec) for folder in (tmp_path / "single", tmp_path))
    assert_same_tensors(packed, single)
    save_weights(packed, spec, tmp_path / "again")
    assert_same_tensors(load_weights(tmp_path / "again", spec), single)
    assert read_index(tmp_path) == read_index(tmp_path / "single") == tensor_shapes(spec)
    assert_same_tensors(pack_experts(single), dict(state))
    for expert in range(4):
        gate_up_FD = state[f"{at}.gate_up_proj"][expert]
        assert_same_bytes(single[f"{at}.{expert}.gate_proj.weight"], gate_up_FD[:16])
        assert_same_bytes(single[f"{at}.{expert}.up_proj.weight"], gate_up_FD[16:])
        assert_same_bytes(single[f"{at}.{expert}.down_proj.weight"], state[f"{at}.down_proj"][expert])


def test_case_C1_nothing_stays_at_its_poison_after_loading(tmp_path):
    from transformers import AutoModelForCausalLM

    spec, weights = tiny()
    save_weights(weights, spec, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    missing, extra = model.load_state_dict(pack_experts(load_weights(tmp_path, spec)))
    assert not missing and not extra
    assert all(p.isfinite().all() for p in model.parameters())
    wrong = {**weights, "model.layers.1.mlp.experts.0.down_proj.weight": torch.zeros(16, 32).bfloat16()}
    with pytest.raises(WeightsError, match=r"0\.down_proj\.weight has \(16, 32\), the model needs \(32, 16\)"):
        save_weights(wrong, spec, tmp_path)


def test_case_R7_a_tie_survives_saving_and_loading(tmp_path):
    spec, weights = tiny("qwen3", tie_word_embeddings=True)
    save_weights(weights, spec, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert_same_bytes(model.lm_head.weight.data, weights["model.embed_tokens.weight"])

    with_key = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(with_key, tmp_path / "model.safetensors")
    assert_same_tensors(load_weights(tmp_path, spec), weights)
    assert "lm_head.weight" not in read_index(tmp_path)
    save_file(with_key | {"lm_head.weight": -with_key["lm_head.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"ties lm_head.weight .* holds two different tensors"):
        load_weights(tmp_path, spec)


def test_case_C6_values_keep_their_declared_type(tmp_path):
    spec, weights = tiny("llama")
    mixed = {n: t.float() + 1e-3 if "norm" in n else t for n, t in weights.items()}
    save_weights(mixed, spec, tmp_path)
    assert_same_tensors(load_weights(tmp_path, spec), mixed)
    half = {n: t.half() for n, t in weights.items()}
    save_file(half, tmp_path / "model.safetensors")
    assert_same_tensors(load_weights(tmp_path, spec), {n: t.float() for n, t in half.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_C7_saved_types_are_those_of_the_plan_and_the_config_says_so(dtype, tmp_path):
    spec, weights = tiny()
    plan = resolve(PRESETS["mxfp8"], spec.to_hf_config(), tensor_shapes(spec))
    on_grid = {
        name: t if plan[name].weight is None else dequantize(quantize(t, QUANTIZERS[plan[name].weight]), torch.bfloat16)
        for name, t in weights.items()
    }
    save_weights({n: t.to(dtype) for n, t in on_grid.items()}, spec, tmp_path)
    loaded = load_weights(tmp_path, spec)
    assert Counter(t.dtype for t in loaded.values()) == {dtype: len(plan.tensors)}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    changed = {n for n in loaded if not torch.equal(loaded[n].float(), weights[n].float())}
    assert changed == {n for n, t in plan.tensors.items() if t.weight}
    assert_same_tensors({n: t.bfloat16() for n, t in loaded.items()}, on_grid)


def test_a_checkpoint_that_does_not_fit_names_every_tensor_and_both_shapes(tmp_path):
    spec, weights = tiny("qwen3")
    norm = "model.norm.weight"
    cases = [
        ({n: t for n, t in weights.items() if n != norm}, "missing: model.norm.weight"),
        ({**weights, "model.layers.2.mlp.up_proj.weight": torch.ones(32)}, "extra: model.layers.2.mlp.up_proj.weight"),
        ({**weights, norm: torch.ones(31)}, r"model.norm.weight has \(31,\), the model needs \(32,\)"),
        ({**weights, norm: torch.ones(32).to(torch.float8_e4m3fn)}, r"model.norm.weight \(F8_E4M3\); weights must be"),
    ]
    for tensors, message in cases:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            load_weights(tmp_path, spec)
    save_file({**weights, "model.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    assert_same_tensors(load_weights(tmp_path, spec), weights)


def test_experts_that_are_missing_beyond_or_twice_are_named(tmp_path):
    spec, weights = tiny()
    at = "model.layers.1.mlp.experts"
    packed = pack_experts(weights)
    for tensors, message in [
        ({n: t for n, t in weights.items() if f"{at}.3." not in n}, rf"missing: {at}\.3\.gate_proj"),
        (
            packed | {f"{at}.down_proj": torch.ones(5, 32, 16)},
            rf"extra: {at}\.4\.down_proj\.weight, in {at}\.down_proj",
        ),
        (
            packed | {f"{at}.gate_up_proj": torch.ones(4, 34, 32)},
            r"gate_proj.weight has \(17, 32\), the model needs \(16",
        ),
        (weights | packed, "both packed and one by one"),
    ]:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            load_weights(tmp_path, spec)


def test_a_truncated_or_missing_file_is_named(tmp_path):
    spec, weights = tiny("llama")
    save_weights(weights, spec, tmp_path, max_shard_bytes=SHARD_BYTES)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for length in (len(whole) - 7, 4, 0):
        shard.write_bytes(whole[:length])
        for read in (lambda: load_weights(tmp_path, spec), lambda: read_index(tmp_path)):
            with pytest.raises(WeightsError, match=f"{shard.name} is truncated or damaged"):
                read()
    shard.unlink()
    with pytest.raises(WeightsError, match=f"{shard.name} is missing"):
        load_weights(tmp_path, spec)
    index = tmp_path / "model.safetensors.index.json"
    shard.write_bytes(whole)
    listed = json.loads(index.read_text())
    listed["weight_map"]["ghost.weight"] = shard.name
    index.write_text(json.dumps(listed))
    with pytest.raises(WeightsError, match=f"ghost.weight missing from {shard.name}"):
        load_weights(tmp_path, spec)
    index.write_text("{")
    with pytest.raises(WeightsError, match="cannot be read as JSON"):
        load_weights(tmp_path, spec)
    with pytest.raises(WeightsError, match="no weights in"):
        load_weights(tmp_path / "nowhere", spec)


def test_nan_and_inf_are_named_with_their_count(tmp_path):
    spec, weights = tiny("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    bad = weights[name].clone()
    bad[0, :3] = torch.nan
    bad[1, 0] = torch.inf
    save_file(weights | {name: bad}, tmp_path / "model.safetensors")
    with pytest.raises(NonFiniteError, match=f"{name} has 4 NaN or Inf among 1536"):
        load_weights(tmp_path, spec)
    with pytest.raises(NonFiniteError, match=f"{name} has 4"):
        save_weights(weights | {name: bad}, spec, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("before", [SHARD_BYTES, 10**9], ids=["shards before", "one file before"])
@pytest.mark.parametrize("after", [SHARD_BYTES, 10**9], ids=["shards after", "one file after"])
def test_a_new_checkpoint_replaces_the_old_one_and_leaves_other_files(before, after, tmp_path):
    spec, weights = tiny("qwen3")
    newer = {n: -t for n, t in weights.items()}
    save_weights(weights, spec, tmp_path, max_shard_bytes=before)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_weights(newer, spec.to_hf_config(), tmp_path, max_shard_bytes=after)
    assert_same_tensors(load_weights(tmp_path, spec), newer)
    assert {"tokenizer.json", "config.json"} <= files(tmp_path).keys()
    assert not list(tmp_path.glob(".*")), "temporary files"
    total = sum(t.nbytes for t in newer.values())
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) < total + 20_000


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 10**9], ids=["shards", "one file"])
def test_a_full_disk_leaves_the_last_good_checkpoint(shard_bytes, tmp_path):
    spec, weights = tiny("qwen3")
    save_weights(weights, spec, tmp_path, max_shard_bytes=shard_bytes)
    before = files(tmp_path)
    newer = {n: -t for n, t in weights.items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # a file that grows past it fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"cannot write weights to .* last good ones are still there"):
            save_weights(newer, spec, tmp_path, max_shard_bytes=shard_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == before
    assert_same_tensors(load_weights(tmp_path, spec), weights)


@pytest.mark.parametrize("weight_map", [[], {"a": 3}, 3])
def test_an_index_that_names_no_files_is_an_error(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match="weight_map must name a file for every tensor"):
        read_index(tmp_path)
