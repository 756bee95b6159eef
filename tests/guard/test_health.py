"""The sentinel's limits of what is sampled: answers that end, a policy that is neither uniform nor one token."""

import math

import pytest

from onegrid.errors import ConfigError
from onegrid.guard.config import GuardConfig
from onegrid.guard.health import ENTROPY, TRUNCATED, Limits, within_limits

VOCABULARY = 1000


def judge(truncated, share, **limits):
    metrics = {TRUNCATED: truncated, ENTROPY: share * math.log(VOCABULARY)}
    return within_limits(metrics, GuardConfig(**limits).limits, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("truncated", "share", "limits", "told"),
    [
        (0.0, 0.0, {}, None),
        (1.0, 1.0, {}, None),
        (1.0, 1.0 + 1e-6, {}, None),  # rounding
        (0.5, 0.5, {"truncated_limit": 0.5, "entropy_low": 0.5, "entropy_high": 0.5 + 1e-9}, None),
        (0.51, 0.5, {"truncated_limit": 0.5}, "rollout/truncated_share 0.51, 51.0% of all answers, allowed 0.0% to 50"),
        (0.0, 0.96, {"entropy_high": 0.95}, "train/entropy 6.631, 96.0% of ln(vocabulary), allowed 0.0% to 95.0%"),
        (0.0, 0.01, {"entropy_low": 0.02}, "train/entropy 0.06908, 1.0% of ln(vocabulary), allowed 2.0% to 100.0%"),
        (math.nan, 0.5, {}, "rollout/truncated_share nan"),
        (0.0, math.nan, {}, "train/entropy nan"),
        (0.0, math.inf, {}, "train/entropy inf"),
        (0.0, -0.1, {}, "train/entropy -0.69"),
        (0.0, 1.01, {}, "train/entropy 6.977, 101.0%"),
    ],
)
def test_shares_within_the_limits_pass_and_others_are_told(truncated, share, limits, told):
    verdict = judge(truncated, share, **limits)
    assert verdict.status == ("passed" if told is None else "failed")
    assert (verdict.check, verdict.condition) == ("sentinel", "C6")
    if told is not None:
        assert told in verdict.found and "cap of new tokens" in verdict.cause


def test_what_was_not_measured_is_not_judged():
    limits = Limits(0.0, (0.4, 0.5))
    assert within_limits({}, limits, vocab_size=VOCABULARY).passed
    assert within_limits({TRUNCATED: 0.0}, limits, vocab_size=VOCABULARY).passed
    assert within_limits({ENTROPY: 0.0}, Limits(), vocab_size=1).passed
    assert not within_limits({ENTROPY: 0.0}, limits, vocab_size=VOCABULARY).passed


@pytest.mark.parametrize(
    "limits",
    [
        {"truncated_limit": -0.1},
        {"truncated_limit": 1.1},
        {"truncated_limit": math.nan},
        {"entropy_low": 0.5, "entropy_high": 0.4},
        {"entropy_high": math.nan},
        {"entropy_high": 7.0},
        {"entropy_low": -1.0},
    ],
)
def test_limits_that_are_no_shares_are_refused(limits):
    with pytest.raises(ConfigError, match=r"truncated_limit is|entropy_low is"):
        GuardConfig(**limits)
