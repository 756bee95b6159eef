"""The matrix of faults and checks, whole: a row names the checks that must fire at its fault; no other may."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onegrid.guard.config import CHECKS
from onegrid.guard.faults import FAULTS
from onegrid.study.campaign import Outcome, guarded, try_fault
from onegrid.study.fault_report import problems, rows

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
FIRST = {fault: check for check, fault in ONE_FOR_EACH_CHECK.items()}
FIRST |= {"bucket_cut": "transaction", "lost_in_sleep": "wake", "nan_in_master": "finite"}  # cannot be switched off
FIRST |= {"scales_stay_zero": "digest", "scales_stay_nan": "digest"}
"""Fault -> what stops the run."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Callable[[str], Outcome]:
    """Fault -> both runs of it, once as runs are, once with every check asked and none obeyed; run once for all."""
    known: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in known:
            known[name] = try_fault(FAULTS[name], tmp_path_factory.mktemp(name))
        return known[name]

    return outcome


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fires_the_checks_of_its_row_and_no_other(name, tried):
    outcome = tried(name)
    assert outcome.fires == FAULTS[name].fires
    assert outcome.as_claimed and outcome.named_right and outcome.safe
    assert not problems([outcome], None, None)
    (row,) = rows([outcome], None, None)
    assert (row["device"], row["weights"]) == ("cpu", "auto")


@pytest.mark.parametrize("name", FIRST)
def test_a_fault_is_stopped_by_the_check_that_is_there_for_it(name, tried):
    found = tried(name)
    assert found.changed > 0 and FIRST[name] in FAULTS[name].fires
    assert (found.caught_by, found.named_right, found.safe) == (FIRST[name], True, True)
    assert found.at in ("sync 2", "step 3")


@pytest.mark.parametrize(("check", "name"), ONE_FOR_EACH_CHECK.items())
def test_a_check_earns_its_place_by_a_fault_that_nobody_else_names(check, name, tried, tmp_path):
    found, missed = tried(name), guarded(FAULTS[name], tmp_path, off=(check,))
    assert found.caught_by == check and found.named_right
    assert not (missed["named_right"] and missed["at"] == found.at)


def test_every_check_has_a_fault_and_every_fault_a_check():
    assert ONE_FOR_EACH_CHECK.keys() == set(CHECKS)
    seen = {check for f in FAULTS.values() for check in f.fires}
    assert seen == {*CHECKS, "transaction", "wake", "finite"}
    assert [f.name for f in FAULTS.values() if not f.fires] == ["buckets_reordered"]
    assert {f.published for f in FAULTS.values()} >= {f"F{i}" for i in range(1, 7)}
    assert {f.condition for f in FAULTS.values()} == {f"C{i}" for i in range(1, 8)}
