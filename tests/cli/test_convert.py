"""`onegrid convert`, `onegrid inspect` and `onegrid audit` on a small model with experts."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.cli.audit import run as audit
from onegrid.cli.inspect import run as inspect
from onegrid.errors import ConfigError
from tests.convert.checkpoints import bf16_model


@pytest.fixture
def converted(tmp_path):
    """A BF16 checkpoint and its NVFP4 form."""
    bf16_model(tmp_path / "bf16", "moe")
    command = [
        "convert",
        str(tmp_path / "bf16"),
        str(tmp_path / "low"),
        "--recipe",
        "nvfp4_experts",
        "--layout",
        "modelopt",
    ]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "12 of 35 tensors quantized" in result.stdout and "note: scales per token of the input" in result.stdout
    return tmp_path


def test_conversion_and_the_way_back_say_what_went_where(converted):
    back = ["convert", str(converted / "low"), str(converted / "back"), "--recipe", "bf16"]
    result = CliRunner().invoke(app, back, catch_exceptions=False)
    assert "0 of 35 tensors quantized" in result.stdout
    assert "not written: model.layers.#.mlp.experts.#.up_proj.input_scale (4 keys): static scale" in result.stdout


def test_inspection_shows_formats_grids_exclusions_and_errors(converted, capsys):
    rows = inspect(converted / "low", reference=converted / "bf16")
    text = capsys.readouterr().out
    assert "weight_scale F8_E4M3 32x4, weight_scale_2 (multiplier)" in text
    assert "declared: modelopt, NVFP4 (nvfp4); key/value cache bf16" in text and "  model.layers.#.mlp.gate (1)" in text
    for row in rows:
        assert row.relative_error is not None
        # E2M1 under block scales: about 0.095 on normal numbers, and never as much as losing a bit more would give
        assert 0.05 < row.relative_error < 0.2 if row.fmt == "nvfp4" else row.relative_error == 0.0
    assert len(inspect(converted / "bf16", full=True)) == len(rows)
    assert "says nothing of quantization" in capsys.readouterr().out


def test_an_audit_ends_well_for_its_own_recipe_and_names_every_tensor_for_another(converted, capsys):
    assert audit(converted / "low", "nvfp4_experts") == []
    assert "all 35 tensors as planned" in capsys.readouterr().out
    result = CliRunner().invoke(app, ["audit", str(converted / "low"), "--recipe", "nvfp4_all"])
    assert result.exit_code == 1
    assert "model.layers.#.self_attn.q_proj.weight: stored: planned nvfp4, found bf16 (2 tensors)" in result.stdout
    with pytest.raises(ConfigError, match="did you mean 'vllm-modelopt'"):
        audit(converted / "low", "nvfp4_experts", engines=("vllm-modelop",))


def test_fault_F2_in_a_foreign_configuration_is_named_by_the_audit(tmp_path, capsys):
    bf16_model(tmp_path / "bf16", "moe")
    command = ["convert", str(tmp_path / "bf16"), str(tmp_path / "low"), "--recipe", "mxfp8", "--layout", "modelopt"]
    CliRunner().invoke(app, command, catch_exceptions=False)
    path = tmp_path / "low" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "mlp.gate"]
    path.write_text(json.dumps(config))
    found = audit(tmp_path / "low", "mxfp8")
    assert {d.tensor for d in found} == {f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")}
    assert {(d.where, d.planned, d.found) for d in found} == {("vllm-modelopt", "mxfp8", "bf16")}
    assert "gate_proj.weight: vllm-modelopt: planned mxfp8, found bf16" in capsys.readouterr().out
