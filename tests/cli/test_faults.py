"""`onegrid faults` before a fault is tried: what could not be kept or typed is said at once."""

from __future__ import annotations

import importlib

import pytest
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import ConfigError
from onegrid.guard.faults import FAULTS


@pytest.fixture(autouse=True)
def nothing_is_tried(monkeypatch):
    for name in ("try_alone", "run_kills", "run_corruptions", "run_healthy"):
        monkeypatch.setattr(
            importlib.import_module("onegrid.cli.faults"), name, lambda *a, **k: pytest.fail("something was tried")
        )


@pytest.mark.parametrize("option", ["--json", "--page"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_tried(option, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(app, ["faults", "--campaign", "full", option, str(tmp_path / "file" / "rows")])
    assert isinstance(result.exception, ConfigError) and f"{option} " in str(result.exception)
    assert "cannot be written" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("seed", ["-1", str(2**32), "9" * 30, "x"])
def test_a_seed_that_no_generator_takes_is_wrong_usage(seed):
    result = CliRunner().invoke(app, ["faults", "--campaign", "quick", "--seed", seed])
    assert result.exit_code == 2 and "Invalid value for '--seed'" in result.output


def test_a_campaign_of_chosen_faults_is_wrong_usage():
    """It would be written down as a campaign of all."""
    result = CliRunner().invoke(app, ["faults", "bucket_lost", "--campaign", "full"])
    assert result.exit_code == 2 and "not both" in result.output


@pytest.mark.parametrize("held", ["{", "{}", "[1]", "7", '{"verdicts": 3}', '{"verdicts": [{"x": 1}]}'])
def test_a_kept_piece_that_is_damaged_is_named(held, tmp_path):
    (tmp_path / "fault_bucket_lost.json").write_text(held)
    result = CliRunner().invoke(app, ["faults", "bucket_lost", "--work", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "fault_bucket_lost.json is no piece of a campaign" in str(result.exception)
    assert (tmp_path / "fault_bucket_lost.json").read_text() == held


def test_every_name_of_the_list_is_whole_on_a_narrow_terminal():
    said = CliRunner().invoke(app, ["faults", "--list"], env={"COLUMNS": "60"}).output
    assert all(name in said for name in FAULTS)
