"""The table at the end of a run says what was checked, and what was not."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from onegrid.cli.train import summary
from onegrid.guard.config import CHECKS

ALL = {f"guard/{check}": 1 for check in CHECKS}
REST = [check for check in CHECKS if check != "audit"]


@pytest.mark.parametrize(
    ("line", "num_incidents", "told"),
    [
        (ALL, 0, "8 passed, 0 failed, 0 could not tell"),
        (ALL | {"guard/probe": -1}, 2, "7 passed, 0 failed, 1 could not tell, 2 incidents"),
        ({"guard/audit": 0}, 1, f"0 passed, 1 failed, 0 could not tell, 1 incident; not asked: {', '.join(REST)}"),
    ],
)
def test_the_table_counts_verdicts_and_incidents_and_names_checks_that_were_not_asked(
    line, num_incidents, told, tmp_path
):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1} | line) + "\n")
    (tmp_path / "incidents.jsonl").write_text("{}\n" * num_incidents)
    console = Console(width=300)
    with console.capture() as shown:
        console.print(summary(tmp_path))
    (row,) = [text for text in shown.get().splitlines() if "checks  " in text]
    assert row.split("│")[2].strip() == told
