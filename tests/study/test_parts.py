"""From a configuration to the parts of a run, and what they will take."""

from __future__ import annotations

import json

import pytest
import torch

from onegrid.config import load_config
from onegrid.errors import ConfigError, NonFiniteError, SpecError, TaskError, WeightsError
from onegrid.formats import QuantTensor
from onegrid.model.weights import load_weights
from onegrid.study.estimate import memory_estimate, published_bytes
from onegrid.study.parts import build, design
from tests.rl.tiny import CONFIG, write_tiny_run


def designed(folder, *overrides):
    """The design of a tiny run."""
    return design(load_config(write_tiny_run(folder), overrides), folder)


def test_a_design_fills_in_device_folder_and_stop_tokens(tmp_path):
    config = designed(tmp_path, "device=auto").config
    assert config.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert config.model.checkpoint == str((tmp_path / "model").resolve())
    assert config.sampling.stop_token_ids == (2,)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere has no config\.json"):
        designed(tmp_path, "model.checkpoint=nowhere")


def test_impossible_shapes_are_refused_before_weights_are_read(tmp_path):
    path = write_tiny_run(tmp_path)
    broken = {key: value for key, value in CONFIG.items() if key != "head_dim"} | {"num_attention_heads": 5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(broken))
    with pytest.raises((SpecError, WeightsError), match="5"):
        build(design(load_config(path), tmp_path))


def test_too_few_held_out_problems_end_a_run_before_it_leaves_anything(tmp_path):
    from onegrid.cli.train import run

    path, folder = write_tiny_run(tmp_path), tmp_path / "run"
    for dry in (True, False):
        with pytest.raises(TaskError, match="500 held-out problems were asked for, but only"):
            run(path, ["eval.num_problems=500"], run_dir=folder, num_steps=1, resume=False, dry_run=dry)
        assert not folder.exists()


def test_a_weight_that_is_not_finite_is_named_with_its_count(tmp_path):
    from safetensors.torch import load_file, save_file

    plan = designed(tmp_path)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][3:5] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight.*2 "):
        build(plan)


@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4_experts"])
def test_the_estimate_of_a_version_is_what_the_learner_publishes(tmp_path, preset):
    plan = designed(tmp_path, f"recipe.preset={preset}")
    actual = 0
    for tensor in build(plan).learner.canonical().values():
        parts = [tensor.codes, tensor.scales] if isinstance(tensor, QuantTensor) else [tensor]
        actual += sum(part.nbytes for part in parts)
    assert published_bytes(plan.spec, plan.plan, "weight") == actual


def test_the_estimate_adds_up_and_grows_with_the_micro_batch(tmp_path):
    small, large = (memory_estimate(designed(tmp_path, f"learner.max_tokens={n}")) for n in (64, 4096))
    assert small["total"] == sum(value for key, value in small.items() if key != "total")
    assert small["learner: FP32 masters"] == 4 * sum(
        t.numel() for t in load_weights(tmp_path / "model", designed(tmp_path).spec).values()
    )
    assert large["total"] > small["total"]


@pytest.mark.parametrize("ids", ["[2, 18]", "[-1]"])
def test_a_stop_token_outside_the_vocabulary_is_refused(tmp_path, ids):
    said = r"sampling\.stop_token_ids has .*the model's ids are 0 \.\. 17|stop_token_ids is \(-1,\).*ids from 0 on"
    with pytest.raises(ConfigError, match=said):
        designed(tmp_path, f"sampling.stop_token_ids={ids}")
    designed(tmp_path, "sampling.stop_token_ids=[0, 17]")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 99]}')
    with pytest.raises(ConfigError, match=r"eos_token_id of .*model has \[99\]"):
        design(load_config(tmp_path / "run.toml"), tmp_path)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_before_weights_are_quantized(tmp_path, monkeypatch):
    from onegrid.rl.characters import CharacterTokenizer

    plan = designed(tmp_path)
    monkeypatch.setattr(CharacterTokenizer, "vocab_size", 19)
    with pytest.raises(ConfigError, match=r"has 19 ids, the model 18"):
        build(plan)
