"""Faults in the real loop: each is caught by the checks that its row names, by no other, and named rightly."""

from __future__ import annotations

import pytest

from onegrid.errors import ConfigError
from onegrid.guard.faults import FAULTS, fault
from onegrid.guard.guard import CHECKS
from onegrid.study.campaign import try_fault
from onegrid.study.corruptions import run_corruptions, run_healthy
from onegrid.study.fault_report import markdown, problems, rows

ONE_FOR_EACH_CHECK = {
    "activations_floor": "audit",
    "one_byte_of_one_expert": "digest",
    "commit_ignored": "selfcheck",
    "tied_copy": "probe",
    "prefix_kept": "freshness",
    "backward_ignored": "bytes",
    "bucket_cut": "transaction",
    "lost_in_sleep": "wake",
    "buckets_reordered": "",
}
"""Faults that this check is the first to see, so that without it they are seen later, or by nobody. The campaign
(`onegrid faults --campaign quick`) runs all of them."""


@pytest.mark.parametrize("name", ONE_FOR_EACH_CHECK)
def test_a_fault_is_caught_at_once_by_the_checks_of_its_row_and_by_no_other(name, tmp_path):
    outcome = try_fault(FAULTS[name], tmp_path)
    assert outcome.changed > 0
    assert outcome.fires == FAULTS[name].fires
    assert outcome.caught_by == ONE_FOR_EACH_CHECK[name]
    assert outcome.at in ("sync 2", "step 3", "")
    assert outcome.named_right and outcome.safe
    assert not problems([outcome], None, None)


def test_every_check_has_a_fault_and_every_fault_a_check():
    seen = {check for f in FAULTS.values() for check in f.fires}
    assert seen == {*CHECKS, "transaction", "wake", "finite"}
    assert [f.name for f in FAULTS.values() if not f.fires] == ["buckets_reordered"]
    assert {f.published for f in FAULTS.values()} >= {f"F{i}" for i in range(1, 7)}
    assert {f.condition for f in FAULTS.values()} == {f"C{i}" for i in range(1, 8)}


def test_faults_are_known_by_name():
    with pytest.raises(ConfigError, match="did you mean 'bucket_lost'"):
        fault("bucket_lots")


def test_corruptions_that_no_list_names_are_caught_and_named():
    tally = run_corruptions(14, 3)
    assert (tally.alarms, tally.named_right, tally.unsafe, tally.missed) == (14, 14, 0, [])
    assert {"fault", "condition", "caught_by", "at", "named_right", "seconds"} <= tally.rows[0].keys()


def test_a_healthy_run_of_synchronizations_has_no_alarm():
    tally = run_healthy(8, 3)
    assert (tally.alarms, tally.missed) == (0, [])
    page = markdown("onegrid faults", [], None, tally)
    assert "0 false alarms in 8" in page
    assert rows([], None, tally)[0]["is_fault"] is False
