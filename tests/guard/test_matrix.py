"""The matrix of faults and checks, whole: a row names the checks that must fire at its fault; no other may."""

import pytest

from onegrid.guard.faults import FAULTS
from onegrid.study.campaign import try_fault
from onegrid.study.fault_report import problems, rows


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fires_the_checks_of_its_row_and_no_other(name, tmp_path):
    """Once as runs are, once with every check asked and none obeyed."""
    outcome = try_fault(FAULTS[name], tmp_path)
    assert outcome.fires == FAULTS[name].fires
    assert outcome.as_claimed and outcome.named_right and outcome.safe
    assert not problems([outcome], None, None)
    (row,) = rows([outcome], None, None)
    assert (row["device"], row["weights"]) == ("cpu", "auto")
