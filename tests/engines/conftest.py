"""Tests against the engines' own code, which is too heavy for the first stage of CI: a stage of its own installs it.

Without the packages the tests of a file are skipped, and say which package they want. In the first stage, where no skip
is allowed, they are not collected at all, and the end of the run says so.
"""

from __future__ import annotations

import os

import pytest

STAGE = os.environ.get("ONEGRID_ENGINES") == "1"
LEFT_OUT = os.environ.get("ONEGRID_REQUIRE_ALL") == "1" and not STAGE
collect_ignore_glob = ["test_*.py"] if LEFT_OUT else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    if LEFT_OUT:
        terminalreporter.write_line("tests/engines: left to the stage with ONEGRID_ENGINES=1, which has the engines")
