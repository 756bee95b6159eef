"""Checkpoints that are broken or mean harm, disks that fill up, and conversions that are killed."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from onegrid.cli.audit import run as audit
from onegrid.cli.inspect import run as inspect
from onegrid.convert import shard_files
from onegrid.convert.convert import convert
from onegrid.convert.source import open_source
from onegrid.errors import CheckpointError, NonFiniteError, RecipeError, WeightsError
from onegrid.formats import QUANTIZERS, quantize
from onegrid.model.weights import read_index
from onegrid.recipe import PRESETS, preset
from tests.convert.checkpoints import bf16_model, files_of, write
from tests.convert.test_cases import FP8, LAYER, NVFP4_MODELOPT, config, fp8_codes, random

INDEX = "model.safetensors.index.json"


def fp8_checkpoint(folder, **change):
    q = quantize(random(64, 64), QUANTIZERS["fp8_128x128_fp32"])
    raw = {f"{LAYER}.weight": fp8_codes(q), f"{LAYER}.weight_scale_inv": q.scales} | change
    return write(folder, config(FP8), {k: v for k, v in raw.items() if v is not None})


def refused(folder, error, message, target, recipe=PRESETS["bf16"], **arguments):
    """Nothing is written, not even hidden beside the target."""
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(error, match=message):
        convert(folder, target, recipe, **arguments)
    assert sorted(target.parent.rglob("*")) == before


def test_a_truncated_shard_is_named(tmp_path):
    bf16_model(tmp_path / "bf16", max_shard_bytes=40_000)
    shard = sorted((tmp_path / "bf16").glob("model-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-3])
    refused(tmp_path / "bf16", WeightsError, rf"{shard.name} is truncated", tmp_path / "out")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"ghost.weight": "model-00001-of-00002.safetensors"}, "ghost.weight missing"),
        ({"ghost.weight": "model-00009-of-00002.safetensors"}, "model-00009-of-00002.safetensors is missing"),
        ({"ghost.weight": "../outside.safetensors"}, "only files in the folder itself"),
        ({"ghost.weight": "/outside.safetensors"}, "only files in the folder itself"),
        ({"ghost.weight": ".."}, "only files in the folder itself"),
        ({"ghost.weight": "sub/outside.safetensors"}, "only files in the folder itself"),
        ({"ghost.weight": "a\0.safetensors"}, "only files in the folder itself"),
        ({"ghost.weight": 7}, "must name a file for every tensor"),
    ],
)
def test_an_index_that_points_nowhere_or_out_of_the_folder_is_refused(entry, message, tmp_path):
    save_file({"ghost.weight": random(4, 4)}, tmp_path / "outside.safetensors")
    write(
        tmp_path / "bad", {"num_hidden_layers": 1}, {"a.weight": random(4, 4)}, {"b.weight": random(4, 4)}, index=entry
    )
    refused(tmp_path / "bad", WeightsError, message, tmp_path / "out")
    with pytest.raises(WeightsError, match=message):
        read_index(tmp_path / "bad")  # what training starts from reads it the same way


def test_an_index_that_lists_a_tensor_twice_is_refused(tmp_path):
    write(tmp_path / "bad", {"num_hidden_layers": 1}, {"a.weight": random(4, 4)}, {"b.weight": random(4, 4)})
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    text = f'{{"weight_map": {{"a.weight": "{names[0]}", "b.weight": "{names[1]}", "a.weight": "{names[1]}"}}}}'
    (tmp_path / "bad" / INDEX).write_text(text)
    refused(tmp_path / "bad", WeightsError, "lists a.weight twice", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {f"{LAYER}.weight_scale_inv": torch.ones(2, 1)},
            WeightsError,
            r"have shape \(2, 1\); fp8_128x128_fp32 has 1 x 1",
        ),
        ({f"{LAYER}.weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, WeightsError, "dtype I32"),
        ({f"{LAYER}.weight_scale_inv": torch.full((1, 1), torch.nan)}, NonFiniteError, "1 scales of .* are NaN"),
        ({f"{LAYER}.weight_scale_inv": -torch.ones(1, 1)}, NonFiniteError, "negative"),
        ({f"{LAYER}.weight_scale_inv": torch.zeros(1, 1)}, WeightsError, "1 scales of .* are 0, and 40.. codes below"),
        ({f"{LAYER}.weight_scale_inv": torch.full((1, 1), 1e38)}, NonFiniteError, "NaN or Inf among 4096"),
        ({f"{LAYER}.weight_scale_inv": torch.ones(1, 1).double()}, WeightsError, "dtype F64"),
        ({f"{LAYER}.weight_scale_inv": torch.ones(0, 1)}, WeightsError, r"have shape \(0, 1\)"),
        ({f"{LAYER}.weight": torch.zeros(0, 64).to(torch.float8_e4m3fn)}, WeightsError, "has 0 x 1 for a weight of 0"),
        ({f"{LAYER}.weight_scale_inv": None}, WeightsError, "has no scale"),
        (
            {f"{LAYER}.weight": torch.full((64, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)},
            NonFiniteError,
            "4096 NaN codes",
        ),
        ({f"{LAYER}.weight": torch.zeros(64, 64, dtype=torch.uint8)}, WeightsError, "U8 .* weights are F8_E4M3"),
        ({f"{LAYER}.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}, WeightsError, "with two axes"),
        (
            {"model.norm.weight": torch.full((4,), torch.inf).bfloat16()},
            NonFiniteError,
            "model.norm.weight has 4 NaN or Inf",
        ),
    ],
)
def test_scales_and_codes_that_cannot_be_are_refused(change, error, message, tmp_path):
    folder = fp8_checkpoint(tmp_path / "bad", **change)
    refused(folder, error, message, tmp_path / "out")
    if any("scale" in key for key in change) and "0, and" not in message and "among 4096" not in message:
        for read in (inspect, lambda folder: audit(folder, "fp8_block")):  # who read scales, and no codes
            with pytest.raises(error, match=message):
                read(folder)


@pytest.mark.parametrize("number", [0.0, torch.inf, torch.nan, -1.0])
def test_a_global_scale_that_is_no_positive_number_is_refused(number, tmp_path):
    q = quantize(random(16, 32), QUANTIZERS["nvfp4"])
    raw = {f"{LAYER}.weight": q.codes, f"{LAYER}.weight_scale": q.scales.view(torch.float8_e4m3fn)}
    raw[f"{LAYER}.weight_scale_2"] = torch.tensor(number)
    folder = write(tmp_path / "bad", config(NVFP4_MODELOPT), raw)
    refused(folder, NonFiniteError, "global scale", tmp_path / "out")
    for read in (inspect, lambda folder: audit(folder, "nvfp4_all")):
        with pytest.raises(NonFiniteError, match="global scale"):
            read(folder)


def test_two_spellings_of_one_tensor_collide(tmp_path):
    at = "model.layers.0.mlp.experts"
    raw = {f"{at}.down_proj": random(2, 4 * 8).reshape(2, 4, 8), f"{at}.1.down_proj.weight": random(4, 8)}
    refused(write(tmp_path / "bad", {"num_hidden_layers": 1}, raw), WeightsError, "is there twice", tmp_path / "out")


def test_a_format_is_never_guessed(tmp_path):
    folder = fp8_checkpoint(tmp_path / "silent")
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    refused(folder, WeightsError, "says nothing of quantization", tmp_path / "out")
    for quantization, message in (
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not known"),
        (FP8 | {"weight_block_size": [64, 64]}, r"\[64, 64\] is not known"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "'INT4_AWQ', which is not known"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is empty"),
    ):
        (folder / "config.json").write_text(json.dumps(config(quantization)))
        refused(folder, RecipeError, message, tmp_path / "out")
    (folder / "config.json").write_text("[]")
    refused(folder, WeightsError, "holds a list", tmp_path / "out")


def test_no_pickle_and_no_code_of_a_checkpoint_is_read_or_copied(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    bf16_model(tmp_path / "bf16")
    for name in ("pytorch_model.bin", "training_args.pt", "modeling.py"):
        (tmp_path / "bf16" / name).write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "bf16" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "bf16", tmp_path / "low", preset("mxfp8"), layout="sglang")
    assert not (tmp_path / "exploded").exists()
    names = {path.name for path in (tmp_path / "low").iterdir()}
    assert names == {"config.json", "conversion.json", "model.safetensors", "tokenizer.json"}


class Killed(BaseException):
    """Not an error of ours: nothing catches it."""


def test_a_killed_conversion_goes_on_and_gives_the_same_files(tmp_path):
    bf16_model(tmp_path / "bf16", "moe")
    arguments = {"layout": "modelopt", "max_shard_bytes": 9_000}
    convert(tmp_path / "bf16", tmp_path / "straight", preset("nvfp4_all"), **arguments)
    for stop in (1, 9, 20, 34):

        def kill(name, place, total, stop=stop):
            if place == stop:
                raise Killed

        target = tmp_path / f"after{stop}"
        with pytest.raises(Killed):
            convert(tmp_path / "bf16", target, preset("nvfp4_all"), on_tensor=kill, **arguments)
        assert not target.exists()
        report = convert(tmp_path / "bf16", target, preset("nvfp4_all"), **arguments)
        assert bool(report.reused) == (stop > 1)
        assert files_of(target) == files_of(tmp_path / "straight")
        assert not list(tmp_path.glob(".*converting"))


def test_another_conversion_does_not_use_what_a_killed_one_left(tmp_path):
    bf16_model(tmp_path / "bf16")

    def kill(name, place, total):
        if place == total:
            raise Killed

    arguments = {"layout": "modelopt", "max_shard_bytes": 20_000}
    with pytest.raises(Killed):
        convert(tmp_path / "bf16", tmp_path / "low", preset("mxfp8"), on_tensor=kill, **arguments)
    report = convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_all"), **arguments)
    assert not report.reused
    convert(tmp_path / "bf16", tmp_path / "straight", preset("nvfp4_all"), **arguments)
    assert files_of(tmp_path / "low") == files_of(tmp_path / "straight")


def test_a_full_disk_leaves_the_last_good_checkpoint_and_no_partial_file(tmp_path, monkeypatch):
    bf16_model(tmp_path / "bf16", "moe")
    arguments = {"layout": "modelopt", "max_shard_bytes": 9_000}
    convert(tmp_path / "bf16", tmp_path / "low", preset("mxfp8"), **arguments)
    before = files_of(tmp_path / "low")
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(shard_files.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_all"), overwrite=True, **arguments)
    assert files_of(tmp_path / "low") == before
    assert not list(tmp_path.glob("**/*.partial"))
    report = convert(tmp_path / "bf16", tmp_path / "low", preset("nvfp4_all"), overwrite=True, **arguments)
    assert len(report.reused) == 2
    assert files_of(tmp_path / "low") != before
    assert {path.name for path in tmp_path.iterdir()} == {"bf16", "low"}


def test_a_target_with_something_in_it_is_only_replaced_on_purpose(tmp_path):
    bf16_model(tmp_path / "bf16")
    bf16_model(tmp_path / "other", vocab_size=32)
    before = files_of(tmp_path / "other")
    with pytest.raises(WeightsError, match="is not empty"):
        convert(tmp_path / "bf16", tmp_path / "other", PRESETS["bf16"])
    with pytest.raises(WeightsError, match="is the source itself"):
        convert(tmp_path / "bf16", tmp_path / "bf16", PRESETS["bf16"], overwrite=True)
    assert files_of(tmp_path / "other") == before
    with pytest.raises(
        RecipeError,
        match=r"no layout is given \(--layout\); layouts that hold it: modelopt, sglang, compressed-tensors",
    ):
        convert(tmp_path / "bf16", tmp_path / "out", preset("mxfp8"))
    assert open_source(tmp_path / "bf16").declared is None
