"""The health of a step beside its mismatch (C6): do answers end, and does the policy still prefer some tokens?

What is computed wrongly on both sides alike has no mismatch. It tends to show in what is sampled: scales in the wrong
layout make the policy nearly uniform, and its answers run into the cap. Limits come from the configuration and never
from the run that is judged, where a fault may have been from the first step on; as they are at first they permit
everything that is a number, since what is too much depends on the task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from onegrid.errors import ConfigError
from onegrid.guard.verdict import Verdict, failed, passed

CHECK, CONDITION = "sentinel", "C6"
TRUNCATED, ENTROPY = "rollout/truncated_share", "train/entropy"


@dataclass(frozen=True, slots=True)
class Limits:
    """Both may be met, not passed. Raises ConfigError for limits that are no shares, or in the wrong order."""

    truncated: float = 1.0
    """Largest share of a step's answers that end at the cap of new tokens."""
    entropy: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest mean entropy of a token, as shares of that of a uniform choice, ln(vocabulary)."""

    def __post_init__(self) -> None:
        if not 0 <= self.truncated <= 1:
            raise ConfigError(f"truncated_limit is {self.truncated}; it is a share of answers, from 0 to 1 (any)")
        low, high = self.entropy
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"entropy_low is {low} and entropy_high {high}; shares of ln(vocabulary), 0 <= low <= high <= 1"
            )


def within_limits(metrics: Mapping[str, float], limits: Limits, *, vocab_size: int) -> Verdict:
    """Of the metrics of a step; one that was not measured, as the entropy of no token, is not judged.

    metrics  TRUNCATED, a share of answers, and ENTROPY, nats a token at the sampling temperature
    """
    uniform = math.log(vocab_size) if vocab_size > 1 else 1.0
    low, high = limits.entropy
    bounds = {TRUNCATED: (1.0, 0.0, limits.truncated), ENTROPY: (uniform, low, high)}
    told, wrong = [], []
    for key, (whole, least, most) in bounds.items():
        if key not in metrics:
            continue
        share = metrics[key] / whole
        said = f"{key} {metrics[key]:.4g}, {share:.1%} of {'all answers' if key == TRUNCATED else 'ln(vocabulary)'}"
        told.append(said)
        # Rounding may lift a uniform choice a little above its own entropy.
        if not (share >= least and (share <= most or (most == 1.0 and share < 1.0 + 1e-3))):
            wrong.append(f"{said}, allowed {least:.1%} to {most:.1%}")
    if wrong:
        expected = "shares within the limits of the configuration"
        return failed(CHECK, CONDITION, expected=expected, found="; ".join(wrong), cause=_CAUSE)
    return passed(CHECK, CONDITION, found="; ".join(told))


_CAUSE = (
    "a policy that is no longer that of its weights on both sides alike (scales in another layout, a stale operand), "
    "a cap of new tokens that is too low, stop tokens that the sampler does not know, or training that has collapsed"
)
