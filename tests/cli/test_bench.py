"""`onegrid bench` prints ratios and writes rows; nothing here looks at a clock's reading."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import OnegridError

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


def test_samplers_that_keep_less_are_compared_with_one_that_keeps_more(tmp_path):
    output = tmp_path / "rows.json"
    arms = ["--presets", "mxfp8", "--weights", "decoded,codes", "--json", str(output)]
    result = CliRunner().invoke(app, ["bench", "sampler", *SMALL, *arms])
    assert result.exit_code == 0, result.output
    decoded, codes = json.loads(output.read_text())
    assert decoded["name"].endswith("weights decoded") and codes["name"].endswith("weights codes")
    assert codes["other"] == decoded["ours"] and codes["why"] == "the same bytes"
    assert codes["weight_bytes"] < decoded["weight_bytes"] / 3  # FP32 operands are gone
    assert codes["peak_bytes"] is None  # a CPU does not say


def test_the_committed_rows_say_why_a_target_is_not_met():
    from pathlib import Path

    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "h200.json").read_text())
    assert rows
    for row in rows:
        assert {"name", "ours", "other", "ratio", "target", "met", "command", "device", "date", "why"} <= row.keys()
        assert row["met"] is not False or row["why"], row["name"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "parts"),
        (["ops", "--model", "gpt"], "shapes"),
        (["ops", "--device", "tpu"], "device is 'tpu'; here it can be auto, cpu"),
        (["ops", "--presets", "bf16,mxfp9"], "mxfp9"),
        (["ops", "--batches", "2,a"], "--batches is 'a'"),
        (["ops", "--prompt", "-1"], "--prompt is -1"),
        (["sampler", "--weights", "codes,packed"], "weights is 'packed'; allowed are auto, decoded, codes"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said):
    result = CliRunner().invoke(app, ["bench", *SMALL, *arguments])
    assert isinstance(result.exception, OnegridError) and said in str(result.exception)
