"""Sentinel (C6): is the mismatch of this step what this pairing is known to have?

The expectation never comes from the run that is judged. An exact pairing has 0: any difference at all is an alarm, and
a false one is impossible while the promise holds. Any other pairing has a stored calibration, made at fixed weights
with audit and digest green: a one-sided cumulative sum (Page, Biometrika 41, 1954) then watches each metric, with
limits for a stated average run length between false alarms. Or the same tokens are replayed on the plan's grids
(guard/prediction.py). Without an expectation the answer is `could not tell`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onegrid.errors import ConfigError
from onegrid.guard.verdict import Verdict, could_not_tell, failed, passed

CHECK, CONDITION = "sentinel", "C6"
WATCHED = ("mismatch/kl", "mismatch/k3", "mismatch/chi2_token", "mismatch/p99", "mismatch/max_abs")
FEWEST = 20
"""Steps of a calibration."""
RUN_LENGTH = 100_000
"""Steps between false alarms, on average, of all watched metrics together."""
ALLOWANCE = 0.5
"""Half the shift, in standard deviations, that is to be found fastest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """Mean and standard deviation of watched metrics at fixed weights, and what they were measured with."""

    mean: dict[str, float]
    deviation: dict[str, float]
    model: str
    plan_digest: str
    engine: str
    num_steps: int

    def __post_init__(self) -> None:
        pairs = {key: (self.mean.get(key, math.nan), self.deviation.get(key, math.nan)) for key in WATCHED}
        wrong = [key for key, (m, sd) in pairs.items() if not math.isfinite(m) or not 0 < sd < math.inf]
        wrong += sorted((self.mean.keys() | self.deviation.keys()) - pairs.keys())
        if wrong:
            raise ConfigError(
                f"a calibration needs a finite mean and a positive deviation of {', '.join(WATCHED)} and of no other "
                f"metric; wrong: {', '.join(wrong)}"
            )
        if not self.num_steps >= FEWEST:
            raise ConfigError(f"a calibration from {self.num_steps} steps; it needs {FEWEST} at least")


def calibrate(lines: Sequence[Mapping[str, float]], *, model: str, plan_digest: str, engine: str) -> Expectation:
    """From the mismatch metrics of at least 20 steps at fixed weights (learning rate 0), audit and digest green.

    A metric that was the same in every step, as a percentile of mostly equal tokens is, gets the largest deviation of
    the others. ConfigError where none of them moved: a chart of that would see nothing.
    """
    if len(lines) < FEWEST:
        raise ConfigError(f"a calibration from {len(lines)} steps; it needs {FEWEST} at least")
    mean, deviation = {}, {}
    for key in WATCHED:
        values = [line.get(key, math.nan) for line in lines]
        mean[key] = math.fsum(values) / len(values)
        deviation[key] = math.sqrt(math.fsum((x - mean[key]) ** 2 for x in values) / (len(values) - 1))
    largest = max(deviation.values())
    if largest == 0:
        told = ", ".join(f"{key} {value:.3g}" for key, value in mean.items())
        raise ConfigError(
            f"all {len(lines)} steps had the same mismatch ({told}), from which no deviation follows; leave "
            "guard.calibration out, so that an exact pairing is held to its bits and any other to a replay "
            "(guard.replay_every)"
        )
    deviation = {key: value or largest for key, value in deviation.items()}
    return Expectation(
        mean=mean,
        deviation=deviation,
        model=model,
        plan_digest=plan_digest,
        engine=engine,
        num_steps=len(lines),
    )


def save_expectation(expectation: Expectation, path: Path) -> None:
    """As JSON."""
    fields = {name: getattr(expectation, name) for name in Expectation.__slots__}
    path.write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_expectation(path: Path, *, plan_digest: str, engine: str, model: str | None = None) -> Expectation:
    """Raises ConfigError for a file that is none, or belongs to another plan, engine or model.

    model  None: any
    """
    try:
        expectation = Expectation(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a calibration: {error}") from error
    if expectation.plan_digest != plan_digest:
        raise ConfigError(f"{path} was made with plan {expectation.plan_digest[:12]}, this run has {plan_digest[:12]}")
    for what, made, here in (("engine", expectation.engine, engine), ("model", expectation.model, model)):
        if here is not None and made != here:
            raise ConfigError(
                f"{path} was made with {what} {made!r}, this run has {here!r}; measure again: "
                "onegrid diagnose CHECKPOINT --calibrate FILE"
            )
    return expectation


@dataclass(slots=True)
class Sentinel:
    """The control chart of one run.

    exact        whether plan and sampler promise equal bits
    expectation  of any other pairing
    """

    exact: bool
    expectation: Expectation | None = None
    sums: dict[str, float] = field(default_factory=dict)

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """metrics  of `mismatch.metrics.compare`; empty where no token takes part in the loss."""
        verdict = self.finite(metrics)
        if not verdict.passed:
            return verdict
        if self.exact:
            return _judge_exact(metrics)
        if self.expectation is None:
            found = (
                f"kl {metrics['mismatch/kl']:.3g}; no calibration (guard.calibration), no replay (guard.replay_every)"
            )
            return could_not_tell(CHECK, CONDITION, expected="an expectation of this pairing", found=found)
        return self._judge_chart(metrics, self.expectation)

    def finite(self, metrics: Mapping[str, float]) -> Verdict:
        """Whether there are numbers at all."""
        if not metrics:
            return could_not_tell(CHECK, CONDITION, expected="tokens to compare", found="none takes part in the loss")
        bad = [key for key in WATCHED if not math.isfinite(metrics.get(key, math.nan))]
        if bad:
            return failed(CHECK, CONDITION, expected="finite numbers", found=f"not finite: {', '.join(bad)}")
        return passed(CHECK, CONDITION)

    def _judge_chart(self, metrics: Mapping[str, float], expectation: Expectation) -> Verdict:
        limit = limit_for(RUN_LENGTH * len(expectation.mean))
        alarms = []
        for key, mean in expectation.mean.items():
            if key not in metrics:
                return could_not_tell(CHECK, CONDITION, expected=key, found="it was not measured")
            z = (metrics[key] - mean) / expectation.deviation[key]
            self.sums[key] = max(0.0, self.sums.get(key, 0.0) + z - ALLOWANCE)
            if self.sums[key] > limit:
                total = self.sums[key]
                alarms.append(f"{key} {metrics[key]:.4g}, expected {mean:.4g}; sum {total:.3g} over {limit:.3g}")
        if alarms:
            return failed(
                CHECK,
                CONDITION,
                expected=f"what the calibration of {expectation.num_steps} steps says",
                found="; ".join(alarms),
                cause=_MISMATCH,
            )
        return passed(CHECK, CONDITION)


def _judge_exact(metrics: Mapping[str, float]) -> Verdict:
    if metrics["mismatch/share_equal"] == 1.0 and metrics["mismatch/max_abs"] == 0.0:
        return passed(CHECK, CONDITION)
    return failed(
        CHECK,
        CONDITION,
        expected="the same bits on both sides, as the plan promises",
        found=f"{1 - metrics['mismatch/share_equal']:.3%} of the log-probabilities differ between learner and sampler, "
        f"by up to {metrics['mismatch/max_abs']:.3g} nats (kl {metrics['mismatch/kl']:.3g})",
        cause=_MISMATCH,
    )


def run_length(limit: float, allowance: float = ALLOWANCE) -> float:
    """Average run length of a one-sided cumulative sum of standard normal values, in steps.

    (exp(2 k b) - 2 k b - 1) / (2 k^2) with b = limit + 1.166. Siegmund, Sequential Analysis (1985), equation 2.57.
    """
    b = 2 * allowance * (limit + 1.166)
    return (math.exp(b) - b - 1) / (2 * allowance**2)


def limit_for(steps: float, allowance: float = ALLOWANCE) -> float:
    """The smallest limit, to 1e-9, whose average run length is at least `steps`."""
    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if run_length(middle, allowance) < steps else (low, middle)
    return high


_MISMATCH = "an order of sums, a weight, an activation or a cached prompt that the two sides do not share"
