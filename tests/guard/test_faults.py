"""Faults where weights lie together and steps are captured, corruptions that no list names, and what is told of both.

Each fault by itself: `test_matrix.py`.
"""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.errors import ConfigError
from onegrid.guard.faults import FAULTS, fault
from onegrid.guard.guard import guard_of
from onegrid.model.canonical import Snapshot
from onegrid.study import campaign
from onegrid.study.campaign import Outcome, try_fault
from onegrid.study.corruptions import run_corruptions, run_healthy
from onegrid.study.fault_report import markdown, rows
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.guard.gpu_flow import as_on_a_gpu

ON_A_GPU = [
    ("norm_rounded", "auto"),  # of storage that steps have captured
    ("graph_with_old_addresses", "auto"),  # of operands that lie together
    ("graph_with_old_addresses", "codes"),  # of codes that packed kernels read
    ("lm_head_quantized", "codes"),  # of what captured steps draw from
]
"""Faults whose injection meets what only a GPU has. Rows are the same there: what fires does not ask for the device."""


@pytest.mark.parametrize(("name", "weights"), ON_A_GPU)
def test_a_fault_fires_the_checks_of_its_row_where_weights_lie_together_and_steps_are_captured(
    name, weights, tmp_path, monkeypatch
):
    as_on_a_gpu(monkeypatch)
    outcome = try_fault(FAULTS[name], tmp_path, weights=weights)
    assert outcome.fires == FAULTS[name].fires
    assert outcome.as_claimed and outcome.named_right and outcome.safe


@pytest.mark.parametrize("weights", ["auto", "codes"])
def test_a_healthy_run_on_captured_steps_reads_what_was_proved(weights, tmp_path, monkeypatch):
    as_on_a_gpu(monkeypatch)
    bench = campaign.make_bench(weights=weights)
    campaign.run_loop(bench, guard_of(campaign.THOROUGH, bench.learner, bench.sampler), tmp_path)
    serving = bench.sampler.reads()
    assert bench.sampler.graphs.graphs and bench.sampler.graphs.reads == serving.read == serving.proved
    group = bench.weights.groups[0]
    assert group in bench.weights.joined or bench.weights.packed.of(group, 16) is not None


@pytest.mark.parametrize("name", ["cache_in_fp8", "tied_copy", "other_epsilon"])
def test_steps_that_were_captured_before_a_fault_or_with_it_do_not_serve_after(name, monkeypatch):
    as_on_a_gpu(monkeypatch)
    bench = campaign.make_bench(FAULTS[name].model)
    FAULTS[name].inject(bench)
    push(Snapshot(version=0, plan_digest=bench.learner.plan.digest, tensors=bench.learner.canonical()), bench.sampler)
    answers = []
    for at in (2, 0, 2):  # the fault rests, acts, and rests
        bench.at = at
        answers += [bench.sampler.probe([(1, 2, 3), (4,)], captured=way) for way in (True, False)]
        assert bench.sampler.graphs.graphs
    healthy, eager, wrong, wrong_eager, again, _ = answers
    assert_same_bytes(healthy, eager)
    assert_same_bytes(wrong, wrong_eager)
    assert_same_bytes(again, healthy)
    assert (name == "tied_copy") == all(torch.equal(x, y) for x, y in zip(wrong, healthy, strict=True))


def test_in_a_wide_model_only_what_depends_on_numbers_may_be_seen_otherwise():
    named = {"fault": "norm_rounded", "condition": "C2", "caught_by": "digest", "at": "sync 2", "seconds": 0.1}
    narrow = Outcome(**named, named_right=True, changed=1, fires=("digest", "probe", "sentinel"))
    assert narrow.as_claimed
    for fires, narrow_is, wide_is in (
        (("digest", "selfcheck"), False, True),
        (("digest", "storage", "probe", "sentinel"), False, False),
        (("probe", "sentinel"), False, False),
    ):
        outcome = dataclasses.replace(narrow, fires=fires)
        assert outcome.as_claimed == narrow_is
        assert dataclasses.replace(outcome, wide=True).as_claimed == wide_is


def test_a_fault_that_crashes_is_told_and_the_others_are_tried(monkeypatch, tmp_path):
    def crash(each, device, weights):
        if each.name == "tied_copy":
            raise RuntimeError("a capture broke off\nand more")
        return Outcome(
            fault=each.name, condition="C2", caught_by="digest", at="sync 2", named_right=True, seconds=0.1,
            changed=1, fires=each.fires, device="a GPU", weights=weights,
        )  # fmt: skip

    monkeypatch.setattr(importlib.import_module("onegrid.cli.faults"), "try_alone", crash)
    page = tmp_path / "page.md"
    names = ["tied_copy", "norm_rounded"]
    result = CliRunner().invoke(app, ["faults", *names, "--weights", "codes", "--page", str(page)])
    assert result.exit_code == 1 and "ok  norm_rounded" in result.output
    assert "BAD tied_copy: RuntimeError: a capture broke off" in result.output and "and more" not in result.output
    said = page.read_text(encoding="utf-8")
    assert "`onegrid faults tied_copy norm_rounded --weights codes --page" in said
    assert 'Every row ran on a GPU with `sampler.weights = "codes"`.' in said


def test_faults_are_known_by_name():
    with pytest.raises(ConfigError, match="did you mean 'bucket_lost'"):
        fault("bucket_lots")
    with pytest.raises(ConfigError, match=r"no fault is called 'nope'; .*`onegrid faults --list` names all"):
        fault("nope")


def test_corruptions_that_no_list_names_are_caught_and_named():
    tally = run_corruptions(8, 3)
    assert (tally.alarms, tally.named_right, tally.unsafe, tally.missed) == (8, 8, 0, [])
    known = {"fault", "condition", "caught_by", "at", "named_right", "seconds", "device", "weights"}
    assert known <= tally.rows[0].keys()


def test_a_healthy_run_of_synchronizations_has_no_alarm():
    tally = run_healthy(4, 3)
    assert (tally.alarms, tally.missed) == (0, [])
    page = markdown("onegrid faults", [], None, tally)
    assert "0 false alarms in 4" in page and 'ran on cpu with `sampler.weights = "auto"`' in page
    (row,) = rows([], None, tally)
    assert (row["is_fault"], row["device"], row["weights"]) == (False, "cpu", "auto")
