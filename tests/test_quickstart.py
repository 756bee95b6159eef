"""The quickstarts are usable as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from onegrid.cli.train import run
from onegrid.config import load_config
from onegrid.rl.record import read_metrics
from onegrid.study.parts import design

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("quickstart*.toml")), ids=lambda path: path.stem)
def test_a_quickstart_promises_equal_bits_unless_another_engine_samples(path):
    plan = design(load_config(path), path.parent)
    if plan.config.sampler.engine == "vllm":  # which promises no bits, and has learned nothing in its three steps
        assert not plan.plan.exact
        return
    assert plan.plan.exact and plan.plan.recipe_name == "mxfp8"
    assert plan.config.eval.num_problems >= 1000


@pytest.mark.parametrize("name", ["quickstart", "quickstart_dense"])
def test_a_quickstart_begins_with_a_start_of_30_to_60_percent_and_is_exact(name, tmp_path):
    small = ["loop.prompts_per_step=4", "eval.num_problems=128", "device=cpu"]
    run(CONFIGS / f"{name}.toml", small, run_dir=tmp_path / "run", num_steps=1, resume=False, dry_run=False)
    start, step = read_metrics(tmp_path / "run")
    assert 0.3 <= start["eval/held_out/accuracy"] <= 0.6
    assert step["mismatch/max_abs"] == 0.0 and step["mismatch/share_equal"] == 1.0
