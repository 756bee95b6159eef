"""Faults in the real loop: each is caught by the checks that its row names, by no other, and named rightly."""

from __future__ import annotations

import pytest

from onegrid.errors import ConfigError
from onegrid.guard.config import CHECKS
from onegrid.guard.faults import FAULTS, fault
from onegrid.study.campaign import guarded, try_fault
from onegrid.study.corruptions import run_corruptions, run_healthy
from onegrid.study.fault_report import markdown, problems, rows
from onegrid.study.pairing import make_bench

ONE_FOR_EACH_CHECK = {
    "audit": "activations_floor",
    "digest": "one_byte_of_one_expert",
    "storage": "tied_copy",
    "selfcheck": "shared_kernel_wrong",
    "probe": "other_epsilon",
    "freshness": "in_flight",
    "sentinel": "other_temperature",
    "bytes": "backward_ignored",
}
"""For each check a fault that is caught and named by it, and by nobody else: what a run without it would miss."""
OTHERS = {"bucket_cut": "transaction", "lost_in_sleep": "wake", "nan_in_master": "finite"}
"""Fault -> what catches it, of what cannot be switched off. `onegrid faults --campaign quick` runs all faults."""


@pytest.mark.parametrize(("check", "name"), ONE_FOR_EACH_CHECK.items())
def test_a_check_earns_its_place_by_a_fault_that_nobody_else_names(check, name, tmp_path):
    found = guarded(FAULTS[name], tmp_path / "on")
    assert found["changed"] > 0 and check in FAULTS[name].fires
    assert (found["caught_by"], found["named_right"], found["safe"]) == (check, True, True)
    assert found["at"] in ("sync 2", "step 3")
    missed = guarded(FAULTS[name], tmp_path / "off", off=(check,))
    assert not (missed["named_right"] and missed["at"] == found["at"])


def test_a_fault_fires_the_checks_of_its_row_and_no_other(tmp_path):
    outcome = try_fault(FAULTS["both_sides_forget"], tmp_path)
    assert outcome.fires == FAULTS["both_sides_forget"].fires
    assert outcome.as_claimed and outcome.named_right and outcome.safe
    assert not problems([outcome], None, None)


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_switched_off_catches_what_its_row_says(name, tmp_path):
    found = guarded(FAULTS[name], tmp_path)
    assert found["changed"] > 0 and found["caught_by"] == OTHERS[name]
    assert found["named_right"] and found["safe"]


def test_every_check_has_a_fault_and_every_fault_a_check():
    assert ONE_FOR_EACH_CHECK.keys() == set(CHECKS)
    seen = {check for f in FAULTS.values() for check in f.fires}
    assert seen == {*CHECKS, "transaction", "wake", "finite"}
    assert [f.name for f in FAULTS.values() if not f.fires] == ["buckets_reordered"]
    assert {f.published for f in FAULTS.values()} >= {f"F{i}" for i in range(1, 7)}
    assert {f.condition for f in FAULTS.values()} == {f"C{i}" for i in range(1, 8)}


def test_faults_are_known_by_name():
    with pytest.raises(ConfigError, match="did you mean 'bucket_lost'"):
        fault("bucket_lots")
    with pytest.raises(ConfigError, match=r"no fault is called 'nope'; .*`onegrid faults --list` names all"):
        fault("nope")


def test_corruptions_that_no_list_names_are_caught_and_named():
    tally = run_corruptions(8, 3)
    assert (tally.alarms, tally.named_right, tally.unsafe, tally.missed) == (8, 8, 0, [])
    assert {"fault", "condition", "caught_by", "at", "named_right", "seconds"} <= tally.rows[0].keys()


def test_a_healthy_run_of_synchronizations_has_no_alarm():
    tally = run_healthy(4, 3)
    assert (tally.alarms, tally.missed) == (0, [])
    page = markdown("onegrid faults", [], None, tally)
    assert "0 false alarms in 4" in page
    assert rows([], None, tally)[0]["is_fault"] is False


@pytest.mark.parametrize("name", ["scales_stay_zero", "scales_stay_nan"])
def test_scales_that_are_never_written_are_named(name, tmp_path):
    found = guarded(FAULTS[name], tmp_path)
    assert found["changed"] > 0 and (found["caught_by"], found["named_right"], found["safe"]) == ("digest", True, True)


def test_every_fault_finds_the_place_that_it_changes():
    for f in FAULTS.values():
        bench = make_bench(f.model, f.preset)
        f.inject(bench)
        assert bench.happened == 0
