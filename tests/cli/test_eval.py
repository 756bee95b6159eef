"""A checkpoint is judged on the run's own held-out problems, and the same way every time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import CheckpointError, ConfigError
from onegrid.rl.record import read_metrics
from tests.rl.tiny import write_tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    config = write_tiny_run(folder)
    arguments = ["train", str(config), "--run-dir", str(folder / "out"), "--steps", "2"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    return folder


def evaluate(*arguments):
    done = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"], catch_exceptions=False)
    return json.loads(done.output)


def test_a_run_is_judged_as_it_judged_itself(run):
    found = evaluate(run / "out", "--samples", 4, "-k", 1, "-k", 2)
    last = read_metrics(run / "out")[-1]
    assert found["eval/held_out/accuracy"] == last["eval/held_out/accuracy"]
    assert (
        found["eval/held_out/accuracy_low"] <= found["eval/held_out/accuracy"] <= found["eval/held_out/accuracy_high"]
    )
    assert found["eval/held_out/pass_at_1"] == pytest.approx(found["eval/held_out/sampled"], rel=1e-12)  # two sums
    assert found["eval/held_out/pass_at_2"] >= found["eval/held_out/pass_at_1"]
    assert evaluate(run / "out", "--samples", 4, "-k", 1, "-k", 2) == found


def test_a_step_is_compared_with_the_start_problem_by_problem(run):
    arguments = ("--config", run / "run.toml", "--samples", 0, "--problems", 6, "--against", run / "model")
    found = evaluate(run / "out" / "checkpoints" / "global_step_1", *arguments)
    assert found["eval/held_out/problems"] == 6
    assert -1 <= found["eval/held_out/gain_low"] <= found["eval/held_out/gain"] <= found["eval/held_out/gain_high"] <= 1
    assert evaluate(run / "model", *arguments)["eval/held_out/gain"] == 0.0


def test_a_person_gets_a_table(run):
    done = CliRunner().invoke(app, ["eval", str(run / "out"), "--samples", "2"], catch_exceptions=False)
    for words in ("8 held-out problems", "greedy accuracy", "pass@1", "pass@2", "unscorable"):
        assert words in done.output


def test_what_is_no_checkpoint_says_so(run, tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        evaluate(tmp_path)
    with pytest.raises(ConfigError, match="--config"):
        evaluate(run / "model")
    with pytest.raises(ConfigError, match=r"k = .9."):
        evaluate(run / "out", "--samples", 2, "-k", 9)
