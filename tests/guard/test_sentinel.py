"""The sentinel has an expectation that does not come from the run, and a stated average run length."""

from __future__ import annotations

import math

import pytest
import torch

from onegrid.errors import ConfigError
from onegrid.guard.sentinel import (
    RUN_LENGTH,
    WATCHED,
    Sentinel,
    calibrate,
    limit_for,
    load_expectation,
    run_length,
    save_expectation,
)

EQUAL = {key: 0.0 for key in WATCHED} | {"mismatch/share_equal": 1.0}


def steps(num, seed=0, shift=0.0):
    """Metrics of steps at fixed weights."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num, len(WATCHED), generator=generator) * 1e-4 + 1e-3 * (1 + shift)
    return [dict(zip(WATCHED, row, strict=True)) | {"mismatch/share_equal": 0.5} for row in noise.tolist()]


def calibration():
    """Of 200 steps."""
    return calibrate(steps(200), model="m", plan_digest="p", engine="e")


def test_an_exact_pairing_expects_exactly_nothing():
    sentinel = Sentinel(exact=True)
    assert sentinel.judge(EQUAL).passed
    found = sentinel.judge(EQUAL | {"mismatch/max_abs": 1e-7, "mismatch/share_equal": 0.999})
    assert (found.status, found.condition) == ("failed", "C6")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_never_mapped_to_one(bad):
    assert Sentinel(exact=True).judge(EQUAL | {"mismatch/kl": bad}).status == "failed"


def test_without_an_expectation_or_tokens_it_cannot_tell():
    assert Sentinel(exact=False).judge(EQUAL).status == "could not tell"
    assert Sentinel(exact=True).judge({}).status == "could not tell"


def test_run_lengths_follow_the_stated_formula():
    assert run_length(limit_for(RUN_LENGTH)) == pytest.approx(RUN_LENGTH, rel=1e-6)
    # A simulation of 4,000 charts with limit 4: the formula says 336 steps; one standard error of the mean is 5.
    generator = torch.Generator().manual_seed(0)
    total, alive, length = torch.zeros(4000), torch.ones(4000, dtype=torch.bool), torch.zeros(4000)
    for _ in range(4000):
        total = (total + torch.randn(4000, generator=generator) - 0.5).clamp(min=0)
        length += alive
        alive &= total <= 4
    assert abs(float(length.mean()) - run_length(4.0)) < 20


def test_a_healthy_chart_is_quiet_and_a_shift_is_found():
    sentinel = Sentinel(exact=False, expectation=calibration())
    assert all(sentinel.judge(line).passed for line in steps(500, seed=1))
    alarms = [i for i, line in enumerate(steps(60, seed=2, shift=0.2)) if not sentinel.judge(line).passed]
    assert alarms and alarms[0] < 30  # a shift of two deviations; the limit is about 11 and each step adds 1.5


def test_a_calibration_is_stored_with_what_it_belongs_to(tmp_path):
    path = tmp_path / "calibration.json"
    save_expectation(calibration(), path)
    assert load_expectation(path, plan_digest="p", engine="e", model="m") == calibration()
    with pytest.raises(ConfigError, match="was made with plan"):
        load_expectation(path, plan_digest="q", engine="e")
    with pytest.raises(ConfigError, match="is not a calibration"):
        load_expectation(tmp_path / "none.json", plan_digest="p", engine="e")
    with pytest.raises(ConfigError, match="at least"):
        calibrate(steps(19), model="m", plan_digest="p", engine="e")
