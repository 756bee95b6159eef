"""`onegrid bench` prints ratios and writes rows; nothing here looks at a clock's reading."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import ConfigError

SMALL = ["--device", "cpu", "--new", "3", "--prompt", "4", "--batches", "2", "--tokens", "32"]


def test_every_part_gives_rows_and_log_probs_are_equal(tmp_path):
    output = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "sampler", "learner", "sync", *SMALL, "--json", str(output)])
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())
    assert all(row["ours"] > 0 and row["device"].startswith("CPU") for row in rows)
    shares = [row for row in rows if "equal bytes" in row["name"]]
    assert len(shares) == 2 and all(row["ratio"] == 1.0 and row["met"] for row in shares)
    assert {row["name"].split()[0] for row in rows} >= {"decode", "learner", "sync"}


def test_the_committed_rows_say_why_a_target_is_not_met():
    from pathlib import Path

    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "h200.json").read_text())
    assert rows
    for row in rows:
        assert {"name", "ours", "other", "ratio", "target", "met", "command", "device", "date", "why"} <= row.keys()
        assert row["met"] is not False or row["why"], row["name"]


@pytest.mark.parametrize(("arguments", "said"), [(["speed"], "parts"), (["ops", "--model", "gpt"], "shapes")])
def test_unknown_parts_and_shapes_are_refused(arguments, said):
    result = CliRunner().invoke(app, ["bench", *arguments, *SMALL])
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)
