"""A run with adapters: it learns adapters alone, resumes to the same bytes, and exports both ways."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from onegrid.cli import app
from onegrid.config import load_config
from onegrid.errors import CheckpointError, ConfigError
from onegrid.rl.checkpoint import load
from onegrid.rl.record import read_metrics
from onegrid.study.estimate import memory_estimate
from onegrid.study.parts import build, design
from tests.bytes import assert_same_bytes
from tests.rl.tiny import lines_without_clocks, write_tiny_run

LORA = ["learner.lora.rank=2", "learner.lora.alpha=8"]


def onegrid(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps in MXFP8 with adapters on every projection, checked against its reference at each."""
    folder = tmp_path_factory.mktemp("run")
    toml = write_tiny_run(folder)
    found = onegrid("train", toml, *LORA, "loop.reference_every=1", "--run-dir", folder / "out", "--steps", 3)
    assert found.exit_code == 0
    return folder


def test_it_has_no_mismatch_all_checks_pass_and_it_moves_away_from_its_reference(run):
    first, *steps = read_metrics(run / "out")
    assert all(line["mismatch/max_abs"] == 0 for line in steps)
    checks = [line[key] for line in [first, *steps] for key in line if key.startswith("guard/")]
    assert 1 in checks and 0 not in checks
    assert all(line["sync/adapter_modules"] == 2 * (4 + 3 * 4) for line in steps)
    assert steps[0]["mismatch/share_equal"] == 1.0
    assert steps[-1]["sync/codes_changed_share"] > 0


def test_the_exported_weights_are_the_merged_ones_and_the_adapter_gives_them_again(run, tmp_path):
    assert onegrid("export", run / "out", tmp_path / "merged").exit_code == 0
    assert onegrid("export", run / "out", tmp_path / "adapter", "--adapter").exit_code == 0
    again = ["learner.lora.adapter=" + str(tmp_path / "adapter")]
    learner = build(design(load_config(run / "out" / "config.toml", again), tmp_path)).learner
    for name, stored in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert_same_bytes(learner.tensors()[name].to(torch.bfloat16), stored, name)
    assert any(t.any() for name, t in learner.adapters.tensors().items() if name.endswith("lora_B"))


def test_a_resumed_run_ends_in_the_bytes_of_one_that_was_not_interrupted(run, tmp_path):
    toml, folder = write_tiny_run(tmp_path), tmp_path / "out"
    arguments = ["train", toml, *LORA, "loop.reference_every=1", "--run-dir", folder]
    assert onegrid(*arguments, "--steps", 1).exit_code == 0
    assert onegrid(*arguments, "--steps", 3, "--resume").exit_code == 0
    ours, theirs = (load(f / "checkpoints" / "global_step_3")["learner"] for f in (folder, run / "out"))
    for name, factor in theirs["adapters"]["factors"].items():
        assert_same_bytes(ours["adapters"]["factors"][name], factor, name)
    assert "masters" not in theirs
    assert lines_without_clocks(folder)[2:] == lines_without_clocks(run / "out")[2:]  # step 1 was the last of its run


def test_a_checkpoint_on_another_base_is_refused(run, tmp_path):
    toml = write_tiny_run(tmp_path)
    from onegrid.model.weights import load_weights, save_weights
    from tests.rl.tiny import CONFIG

    plan = design(load_config(toml, LORA), tmp_path)
    weights = {name: t * 1.5 for name, t in load_weights(tmp_path / "model", plan.spec).items()}
    save_weights(weights, CONFIG, tmp_path / "model")
    learner = build(design(load_config(toml, LORA), tmp_path)).learner
    with pytest.raises(CheckpointError, match="other base weights"):
        learner.load_state_dict(load(run / "out" / "checkpoints" / "global_step_1")["learner"])


def test_a_run_without_adapters_has_none_to_export_and_targets_are_checked_before_weights_are_read(tmp_path):
    toml = write_tiny_run(tmp_path)
    assert onegrid("train", toml, "--run-dir", tmp_path / "out", "--steps", 1).exit_code == 0
    with pytest.raises(ConfigError, match=r"without learner\.lora"):
        onegrid("export", tmp_path / "out", tmp_path / "a", "--adapter")
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        onegrid("train", toml, *LORA, 'learner.lora.targets=["q_prj"]', "--dry-run")


def test_the_estimate_counts_adapters_and_says_what_they_save(tmp_path):
    toml = write_tiny_run(tmp_path)
    whole = memory_estimate(design(load_config(toml), tmp_path))
    found = memory_estimate(design(load_config(toml, LORA), tmp_path))
    learner = build(design(load_config(toml, LORA), tmp_path)).learner
    num_trained = sum(t.numel() for t in learner.trained.values())
    assert found["learner: adapters"] == 4 * num_trained
    assert found["learner: copy of the base"] == sum(t.nbytes for t in learner.adapters.base.values())
    said = next(key for key in found if key.startswith("learner: AdamW"))
    assert found[said] == 8 * num_trained
    assert f"{(whole['total'] - found['total']) / 2**20:.1f} MiB less" in said
