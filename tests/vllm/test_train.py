"""The whole loop with a real vLLM as sampler: every check on, mismatch measured, nothing assumed."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import ConfigError
from tests.rl.tiny import write_tiny_run

pytestmark = pytest.mark.filterwarnings("ignore")

RULE = """
[[recipe.rule]]
kinds = ["linear"]
weight = "mxfp8"
activation = "mxfp8"
backward = "dequantized"
sampler_weight = "mxfp8"
sampler_activation = "bf16"
"""


def train(folder, *overrides):
    """`onegrid train` in this process."""
    path = write_tiny_run(folder)
    path.write_text(path.read_text() + RULE)
    words = ["sampler.engine=vllm", "sampler.vllm.kv_cache_bytes=33554432", "checkpoint.every=0", *overrides]
    return CliRunner().invoke(app, ["train", str(path), *words, "--run-dir", str(folder / "run"), "--steps", "2"])


def test_grpo_runs_with_vllm_and_measures_the_mismatch(tmp_path):
    ended = train(tmp_path, "guard.unknown=record", "guard.probe_band=0.5")
    assert ended.exit_code == 0, ended.output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        for check in ("audit", "bytes", "digest", "freshness", "probe", "transaction"):
            assert line[f"guard/{check}"] == 1, check
        assert line["guard/sentinel"] == 1, "as near to a replay on the plan's grids as such an engine can be"
        assert 0 < line["mismatch/max_abs"] < 1 and math.isfinite(line["mismatch/kl"])
        assert line["sync/tensors"] == 44


def test_a_pairing_without_expectation_does_not_start_unless_told(tmp_path):
    ended = train(tmp_path, "guard.replay_every=0")
    assert isinstance(ended.exception, ConfigError) and "guard.calibration" in str(ended.exception)
