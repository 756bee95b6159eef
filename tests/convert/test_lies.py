"""Checkpoints whose small files lie: links, layers, quantization, expressions without an end, GGUF fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onegrid.cli.audit import run as audit
from onegrid.cli.inspect import run as inspect
from onegrid.convert.convert import convert
from onegrid.convert.gguf import import_gguf
from onegrid.convert.source import open_source
from onegrid.errors import CheckpointError, OnegridError, RecipeError, SpecError, WeightsError
from onegrid.model.spec import ModelSpec
from onegrid.model.weights import load_weights, read_index
from onegrid.recipe import PRESETS, preset
from onegrid.recipe.dialects.foreign import read_config
from onegrid.recipe.dialects.matchers import matched_from_start
from onegrid.rl.export import export_weights
from tests.convert.checkpoints import bf16_model, files_of, write
from tests.convert.gguf_files import tokens, weights_of, write_gguf
from tests.convert.test_cases import FP8, LAYER, config, random
from tests.convert.test_gguf import SPEC
from tests.convert.test_hostile import fp8_checkpoint, refused


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_link_out_of_the_folder_is_not_followed(name, tmp_path):
    """A checkpoint that links to a private file would have it copied into what its user publishes."""
    bf16_model(tmp_path / "bf16")
    (tmp_path / "bf16" / "tokenizer.json").write_text('{"secret": 1}')
    (tmp_path / "private").mkdir()
    (tmp_path / "bf16" / name).rename(tmp_path / "private" / name)
    (tmp_path / "bf16" / name).symlink_to(tmp_path / "private" / name)
    refused(tmp_path / "bf16", WeightsError, f"{name} is a link to .*outside the checkpoint", tmp_path / "out")
    if name == "tokenizer.json":
        with pytest.raises(WeightsError, match="outside the checkpoint"):
            export_weights({}, tmp_path / "bf16", tmp_path / "out")


def test_the_cache_of_the_hub_is_links_and_is_read(tmp_path):
    weights = bf16_model(tmp_path / "hub" / "snapshots" / "rev")
    (tmp_path / "hub" / "blobs").mkdir()
    for path in list((tmp_path / "hub" / "snapshots" / "rev").iterdir()):
        path.rename(tmp_path / "hub" / "blobs" / f"sha-{path.name}")
        path.symlink_to(f"../../blobs/sha-{path.name}")
    convert(tmp_path / "hub" / "snapshots" / "rev", tmp_path / "out", PRESETS["bf16"])
    assert read_index(tmp_path / "out").keys() == weights.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 in its config.json, but no tensor of layer 2"),
        ({"num_hidden_layers": 10**9}, "no tensor of layer 2"),
        ({"num_hidden_layers": "lots"}, "num_hidden_layers is 'lots'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; it must be an object"),
        ({"text_config": [1]}, "text_config is"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused_by_every_reader(fields, message, tmp_path):
    bf16_model(tmp_path / "bf16")
    change(tmp_path / "bf16", **fields)
    refused(tmp_path / "bf16", OnegridError, message, tmp_path / "out")
    for read in (inspect, lambda folder: audit(folder, "mxfp8")):
        with pytest.raises(OnegridError, match=message):
            read(tmp_path / "bf16")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most"),
        ({"num_experts": 10**9}, "num_experts is 1000000000; it must be at most"),
        ({"num_experts": 0}, "num_experts is 0; it must be an integer of at least 1"),
        ({"first_k_dense_replace": 10**9}, "first_k_dense_replace is 1000000000; it must be a number of layers"),
        ({"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x'"),
        ({"mlp_only_layers": [True]}, "must be a list of layer numbers"),
        ({"layer_types": 7}, r"layer_types \[7\]"),
        ({"layer_types": [["full_attention"]]}, "only full attention is"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps inf .* must be finite"),
        ({"rope_theta": float("inf")}, "rope_theta inf must be finite"),
    ],
    ids=str,
)
def test_sizes_that_would_fill_the_memory_or_mean_nothing_are_refused_before_they_do(fields, message, tmp_path):
    bf16_model(tmp_path / "bf16", "moe")
    change(tmp_path / "bf16", **fields)
    with pytest.raises(SpecError, match=message):
        load_weights(
            tmp_path / "bf16", ModelSpec.from_hf_config(json.loads((tmp_path / "bf16" / "config.json").read_text()))
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "cannot be read as JSON: UnicodeDecodeError"),
        (b"[" * 200_000, "cannot be read as JSON: RecursionError"),
        (b'{"num_hidden_layers": 2, "num_hidden_layers": 1}', "lists num_hidden_layers twice"),
        (b"[]", "holds a list"),
    ],
    ids=["no UTF-8", "nests", "twice", "list"],
)
def test_a_small_file_that_is_no_object_is_named_by_every_reader(content, message, tmp_path):
    bf16_model(tmp_path / "bf16")
    (tmp_path / "bf16" / "config.json").write_bytes(content)
    refused(tmp_path / "bf16", WeightsError, message, tmp_path / "out")
    with pytest.raises(WeightsError, match=message):
        read_index(tmp_path / "bf16")


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(**group):
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": WEIGHTS, "targets": []} | group}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ([1], "must be an object"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size 128 is not known"),
        (FP8 | {"ignored_layers": "lm_head"}, "must be a list of names"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups is .* must be an object"),
        (compressed(targets=5), "targets is '5'; it must be a list of names"),
        (compressed(targets=[5]), "must be a list of names"),
        (compressed(input_activations=[1]), "input_activations is .* must be an object"),
        (compressed(weights=WEIGHTS | {"strategy": "block", "block_structure": 128}), "no format that is known"),
        (compressed(targets=["re:("]), "is no regular expression"),
        (compressed(targets=["re:" + "(" * 5000 + ")" * 5000]), "is no regular expression"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, "must be an object"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}, "must be an"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"a": 1}}, "must be an object"),
        ({"quant_method": "modelopt", "quantization": [1]}, "quantization is .* must be an object"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_a_declaration_of_another_shape_is_refused_with_its_value(quantization, message, tmp_path):
    folder = fp8_checkpoint(tmp_path / "bad")
    change(folder, quantization_config=quantization)
    refused(folder, RecipeError, message, tmp_path / "out")


@pytest.mark.parametrize(
    "endless", ["(.*.*)*$!", "^((a|.)+)+z$", "(a|a)*b", "(x?){30}y", ".*.*.*.*.*!", "(?:(?:m|o)+)*!"]
)
def test_an_expression_that_could_take_forever_is_refused_before_it_is_tried(endless, tmp_path):
    with pytest.raises(RecipeError, match="can take forever"):
        matched_from_start(endless, "model.layers.0.self_attn.o_proj" * 4)
    folder = fp8_checkpoint(tmp_path / "bad")
    change(folder, quantization_config=compressed(targets=[f"re:{endless}"]))
    refused(folder, RecipeError, "can take forever", tmp_path / "out")
    declared = read_config(config(compressed(targets=["Linear"]) | {"ignore": [f"re:{endless}"]}))
    assert declared is not None
    change(folder, quantization_config=FP8 | {"modules_to_not_convert": [endless]})
    told = {d.found for d in audit(folder, "fp8_block") if d.where == "transformers-fp8"}
    assert told and all("can take forever" in found for found in told)


@pytest.mark.parametrize(
    "published",
    [
        r".*layers\.\d+\.mlp\.(gate|up|gate_up|down)_proj.*",
        r"(?:model\.)?layers\.(?:0|1)\..*",
        r".*self_attn.*",
        r"(?!.*lm_head).*",
        r"model[.*+]layers\(.*\)\*",
        "vision_tower.*",
    ],
)
def test_expressions_as_published_lists_have_them_are_tried(published):
    assert matched_from_start(published, "nothing of the kind") in (True, False)


def test_a_killed_neighbour_or_a_second_conversion_does_not_write_into_the_first(tmp_path):
    bf16_model(tmp_path / "bf16")
    seen = []

    def second(name, place, total):
        if place == 3:
            with pytest.raises(CheckpointError, match="another conversion works in"):
                convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_all"), layout="modelopt")
            seen.append(name)

    convert(tmp_path / "bf16", tmp_path / "low", preset("mxfp8"), layout="modelopt", on_tensor=second)
    convert(tmp_path / "bf16", tmp_path / "straight", preset("mxfp8"), layout="modelopt")
    assert seen and files_of(tmp_path / "low") == files_of(tmp_path / "straight")


def test_a_process_killed_in_the_middle_leaves_nothing_that_stops_the_next(tmp_path):
    bf16_model(tmp_path / "bf16")
    code = (
        "import os, signal; from pathlib import Path; from onegrid.convert.convert import convert\n"
        "from onegrid.recipe import preset\n"
        "kill = lambda name, place, total: place == 9 and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"convert({str(tmp_path / 'bf16')!r}, {str(tmp_path / 'low')!r}, preset('mxfp8'), layout='modelopt', "
        "max_shard_bytes=20_000, on_tensor=kill)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9
    assert not (tmp_path / "low").exists()
    report = convert(tmp_path / "bf16", tmp_path / "low", preset("mxfp8"), layout="modelopt", max_shard_bytes=20_000)
    convert(tmp_path / "bf16", tmp_path / "straight", preset("mxfp8"), layout="modelopt", max_shard_bytes=20_000)
    assert report.reused and files_of(tmp_path / "low") == files_of(tmp_path / "straight")
    assert {path.name for path in tmp_path.iterdir()} == {"bf16", "low", "straight"}


def test_only_a_checkpoint_is_overwritten_and_never_one_that_holds_the_source(tmp_path):
    bf16_model(tmp_path / "home" / "bf16")
    (tmp_path / "home" / "config.json").write_text("{}")
    (tmp_path / "home" / "letters").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    bf16_model(tmp_path / "home" / "old")
    (tmp_path / "home" / "old" / "runs").mkdir()
    (tmp_path / "home" / "link").symlink_to(tmp_path / "home" / "old")
    (tmp_path / "file").write_text("")
    source, before = tmp_path / "home" / "bf16", sorted(tmp_path.rglob("*"))
    for target, error, message in (
        (tmp_path / "home", WeightsError, "holds the source"),
        (tmp_path / "home" / "bf16" / ".." / "bf16", WeightsError, "is the source itself"),
        (tmp_path / "notes", WeightsError, "has no config.json, so it is no checkpoint"),
        (tmp_path / "home" / "old", WeightsError, "holds the folders runs, so it is no checkpoint"),
        (tmp_path / "home" / "link", WeightsError, "is a link"),
        (tmp_path / "file", WeightsError, "is a file"),
        (tmp_path / "file" / "below", CheckpointError, "Not a directory"),
    ):
        with pytest.raises(error, match=message):
            convert(source, target, PRESETS["bf16"], overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_names_in_any_script_and_a_folder_given_by_a_dot_are_fine(tmp_path, monkeypatch):
    weights = bf16_model(tmp_path / "Gewichte ß 模型")
    (tmp_path / "Ziel ✓").mkdir()
    monkeypatch.chdir(tmp_path / "Ziel ✓")
    convert("../Gewichte ß 模型", ".", PRESETS["bf16"])
    assert read_index(tmp_path / "Ziel ✓").keys() == weights.keys()
    at = "model.layers.0.größe"
    write(tmp_path / "odd", {"num_hidden_layers": 1}, {f"{LAYER}.weight": random(32, 32), f"{at}.weight": random(4, 4)})
    convert(tmp_path / "odd", tmp_path / "low", PRESETS["bf16"])
    assert f"{at}.weight" in open_source(tmp_path / "low").weights


@pytest.mark.parametrize("number", ["\u00b2", "\u0663", "9" * 5000, "-1"], ids=["raised", "arabic", "long", "negative"])
def test_what_only_looks_like_the_number_of_a_layer_is_a_name(number, tmp_path):
    name = f"model.layers.{number}.bias"
    folder = write(tmp_path / "odd", {"num_hidden_layers": 1}, {f"{LAYER}.weight": random(32, 32), name: random(1, 4)})
    convert(folder, tmp_path / "low", PRESETS["bf16"])
    assert read_index(tmp_path / "low").keys() == {f"{LAYER}.weight", name}


def test_a_header_that_has_a_tensor_twice_is_refused(tmp_path):
    """One name of two types: one reader would take the first, another the last."""
    folder = write(tmp_path / "bad", {"num_hidden_layers": 1}, {f"{LAYER}.weight": random(32, 32)})
    entry = '"a.weight": {"dtype": "%s", "shape": [4], "data_offsets": [0, 8]}'
    header = f"{{{entry % 'F16'}, {entry % 'BF16'}}}".encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refused(folder, WeightsError, r"model\.safetensors lists a\.weight twice", tmp_path / "out")
    for read in (inspect, read_index, lambda folder: audit(folder, "mxfp8")):
        with pytest.raises(WeightsError, match=r"a\.weight twice"):
            read(folder)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path):
    """transformers would read one model there, vLLM the other."""
    raw = {f"{LAYER}.weight": random(32, 32)}
    folder = write(tmp_path / "bad", {"num_hidden_layers": 1}, raw, index={})
    save_file({f"{LAYER}.weight": random(32, 32) * 2}, folder / "model.safetensors")
    message = r"holds model\.safetensors, and .* names model-00001-of-00001\.safetensors"
    refused(folder, WeightsError, message, tmp_path / "out")
    for read in (inspect, lambda folder: audit(folder, "bf16")):
        with pytest.raises(WeightsError, match=message):
            read(folder)
    only = {f"{LAYER}.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": only}))
    convert(folder, tmp_path / "out", PRESETS["bf16"])


def test_a_checkpoint_without_tensors_is_none(tmp_path):
    bf16_model(tmp_path / "bf16")
    save_file({}, tmp_path / "bf16" / "model.safetensors")
    refused(tmp_path / "bf16", WeightsError, "holds no tensors", tmp_path / "out")


def test_packed_experts_of_none_are_no_experts(tmp_path):
    raw = {
        f"{LAYER}.weight": random(32, 32),
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(0, 8, 32).bfloat16(),
    }
    refused(write(tmp_path / "none", {"num_hidden_layers": 1}, raw), WeightsError, "0 experts", tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("llama.block_count", "x", "llama.block_count = 'x'; it must be an integer above 0"),
        ("llama.block_count", 10**9, "1000000000 layers"),
        ("llama.attention.head_count", 0, "head_count = 0"),
        ("llama.attention.layer_norm_rms_epsilon", "x", "must be finite and above 0"),
        ("llama.rope.freq_base", float("inf"), "must be finite and above 0"),
        ("tokenizer.ggml.tokens", None, "tokens is 'None'; it must be a list of str"),
        ("tokenizer.ggml.tokens", ["a", "a"], "2 tokens, of which 1 differ"),
        ("tokenizer.ggml.token_type", [1], "but 1 types of tokens"),
        ("tokenizer.ggml.merges", None, "merges is 'None'"),
        ("tokenizer.ggml.merges", ["zz qq"], "merges 'zz qq'"),
        ("tokenizer.ggml.bos_token_id", 10**6, "bos_token_id is '1000000'; the tokenizer has ids 0 to"),
        ("tokenizer.ggml.eos_token_id", "x", "eos_token_id is 'x'"),
        ("tokenizer.chat_template", 5, "chat_template is 5; it must be a text"),
    ],
    ids=str,
)
def test_fields_of_a_gguf_file_that_do_not_fit_are_named(field, value, message, tmp_path):
    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC), **{field: value})
    with pytest.raises(WeightsError, match=message):
        import_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert len(set(tokens())) == len(tokens())
