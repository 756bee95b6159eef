"""`onegrid bench` prints ratios and writes rows; nothing here looks at a clock's reading."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import ConfigError, OnegridError
from onegrid.study import bench

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


ROWS = json.loads((Path(__file__).parents[2] / "benchmarks" / "h200.json").read_text())
FIELDS = {"name", "ours", "other", "ratio", "target", "met", "command", "device", "date", "why"}


def test_the_committed_rows_say_why_a_target_is_not_met_and_how_far_it_can_be():
    assert len({row["name"] for row in ROWS}) == len(ROWS) > 50
    for row in ROWS:
        assert row.keys() >= FIELDS and row["command"] and row["device"].startswith("NVIDIA H200"), row["name"]
        assert row["met"] is not False or "floor" in row["why"], row["name"]


def test_ratios_and_verdicts_of_the_committed_rows_follow_from_their_numbers():
    for row in ROWS:
        if row["other"]:
            assert row["ratio"] == pytest.approx(row["ours"] / row["other"], rel=1e-2), row["name"]
        goal = re.fullmatch(r"(>=|<=) ([\d.]+)", row["target"])
        if goal:
            reached = row["ratio"] >= float(goal[2]) if goal[1] == ">=" else row["ratio"] <= float(goal[2])
            assert row["met"] is reached, row["name"]
        assert (row["met"] is None) == (row["target"] == ""), row["name"]


def test_a_committed_sum_is_of_the_two_rows_before_it():
    what = "snapshot, transfer and commit"
    sums = [index for index, row in enumerate(ROWS) if row["name"].startswith(what)]
    assert len(sums) == 3
    for index in sums:
        making, sync, both = ROWS[index - 2 : index + 1]
        of = both["name"].removeprefix(what)
        assert (making["name"], sync["name"]) == (f"making a version{of}", f"sync{of}")
        assert both["ours"] == pytest.approx(making["ours"] + sync["ours"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "parts"),
        (["ops", "--model", "gpt"], "shapes"),
        (["ops", "--device", "tpu"], "device is 'tpu'; here it can be auto, cpu"),
        (["ops", "--presets", "bf16,mxfp9"], "mxfp9"),
        (["ops", "--batches", "2,a"], "--batches is 'a'"),
        (["ops", "--prompt", "-1"], "--prompt is -1"),
        (["ops", "--batches", "2,\u00b2"], "--batches is '\u00b2'"),  # a digit that is no number
        (["learner", "--tokens", "3"], "--tokens is 3; it must be a number of at least 4"),
        (["sync", "--layers", "0"], "--layers is 0"),
        (["sampler", "--weights", "codes,packed"], "weights is 'packed'; allowed are auto, decoded, codes"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said):
    result = CliRunner().invoke(app, ["bench", *SMALL, *arguments])
    assert isinstance(result.exception, OnegridError) and said in str(result.exception)


@pytest.mark.parametrize("held", ['{"command": 1}', '{"a":', "[1]", '[{"name": "x"}]', "\x00"])
def test_a_file_that_holds_no_rows_is_refused_before_anything_is_measured_and_stays(held, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "bench_sync", lambda *_, **__: pytest.fail("measured"))
    output = tmp_path / "rows.json"
    output.write_text(held)
    result = CliRunner().invoke(app, ["bench", "sync", *SMALL, "--json", str(output)])
    assert isinstance(result.exception, ConfigError) and "rows.json" in str(result.exception)
    assert output.read_text() == held and [x.name for x in tmp_path.iterdir()] == ["rows.json"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "bench_sync", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["bench", "sync", *SMALL, "--json", str(tmp_path / "file" / "rows.json")])
    assert isinstance(result.exception, ConfigError) and "cannot be written" in str(result.exception)


def test_a_run_that_is_stopped_before_its_first_row_leaves_no_file(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise RuntimeError("stopped")

    monkeypatch.setattr(bench, "bench_sync", stop)
    result = CliRunner().invoke(app, ["bench", "sync", *SMALL, "--json", str(tmp_path / "new" / "rows.json")])
    assert isinstance(result.exception, RuntimeError)
    assert not list((tmp_path / "new").iterdir())


def test_rows_of_other_commands_stay_and_those_of_the_same_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["onegrid", "bench", "sync"])
    monkeypatch.setattr(bench, "bench_sync", lambda *_, **__: iter([bench.row("a", 1.0, "s", 2.0, "b", least=0.5)]))
    output = tmp_path / "rows.json"
    output.write_text(json.dumps([{"command": "another"}, {"command": "onegrid bench sync", "name": "old"}]))
    result = CliRunner().invoke(app, ["bench", "sync", *SMALL, "--json", str(output)])
    assert result.exit_code == 0, result.output
    another, new = json.loads(output.read_text())
    assert another == {"command": "another"}
    assert (new["name"], new["ratio"], new["target"], new["met"]) == ("a", 0.5, ">= 0.5", True)


def test_a_table_that_goes_to_a_file_has_every_name_whole_and_no_goals_of_another_machine():
    result = CliRunner().invoke(app, ["bench", "ops", "sync", "pins", "host", *SMALL, "--layers", "1"])
    assert result.exit_code == 0, result.output
    for name in (
        "quantize-decode nvfp4_row (512, 1024)",
        "quantize to codes mxfp8 (512, 1024)",
        "sync tiny mxfp8",
        "host, micro-batch of tiny",
    ):
        assert name in result.output
    assert "start-up proof, shapes of tiny, 1 to 512 rows, again" in result.output
    assert "making a version tiny mxfp8, 1 layers" in result.output
    assert ">=" not in result.output and "<=" not in result.output


SCRIPTS = [
    path
    for path in sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


HELP = """
import contextlib, io, json, runpy, sys
said = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            text.write(f"exit {error.code}")
    said[script] = text.getvalue()
print(json.dumps(said))
"""


def test_every_script_says_what_it_measures_where_it_cannot_run_too():
    """Options that its own page shows are options that it has."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HELP, *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    pages = json.loads(done.stdout.splitlines()[-1])
    assert len(pages) == len(SCRIPTS) > 10
    for script, page in pages.items():
        assert page.endswith("exit 0") and Path(script).name in page, script
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.split("options:")[0]))
        assert shown <= set(re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", page, re.MULTILINE)), script
