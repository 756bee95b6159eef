"""Devices to test on, and what a skip means where everything is supposed to be there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from onegrid.ops.pins import pin

NO_GPU = "needs a GPU"
REQUIRE_ALL = os.environ.get("ONEGRID_REQUIRE_ALL") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the tests are small, and threads that wait for each other on two cores cost more than they give.

    The pins count only before the first product on a GPU, which may be one of a test that knows nothing of them.
    """
    torch.set_num_threads(1)
    pin("cuda")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device kind that the project computes on; without a GPU that half is skipped, and the run says so."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    """For tests of what only a GPU has."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return torch.device("cuda")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Where ONEGRID_REQUIRE_ALL=1 (CI), a test that is skipped for a missing part has failed."""
    report = yield
    _refuse_skip(report, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for whole files, which skip themselves at import."""
    report = yield
    _refuse_skip(report, collector.nodeid)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, nodeid: str) -> None:
    if not (REQUIRE_ALL and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if NO_GPU in reason:
        return
    report.outcome = "failed"
    report.longrepr = f"{nodeid} was skipped, and ONEGRID_REQUIRE_ALL=1 allows no skip but '{NO_GPU}': {reason}"
