"""A sequential test that needs no distribution: bets against the claim that nothing is wrong.

Each observation is a number in -1 .. 1 whose mean is not above 0 while all is well. A bettor who stakes a fixed share
of what it has on the next one being positive cannot expect to gain then, so its capital M, begun anew at 1 whenever it
falls below, exceeds a limit only once in `limit` steps on average, whatever the observations' distribution. Shin,
Ramdas and Rinaldo, "E-detectors" (2022, arXiv 2203.03532), theorem 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from onegrid.errors import ConfigError

STAKE = 0.9
"""Share of the capital on one observation. One that is 1 multiplies the capital by 1.9; one of -1 leaves a tenth."""


@dataclass(slots=True)
class Detector:
    """Capital by name.

    run_length  steps between false alarms of one name, on average, at least
    """

    run_length: float
    capital: dict[str, float] = field(default_factory=dict)
    """Natural logarithm of it, never below 0."""

    def add(self, name: str, values: Iterable[float]) -> bool:
        """One step: bets on all `values`, which know nothing of each other; whether the limit is passed.

        Raises ConfigError for a value outside -1 .. 1, NaN included.
        """
        gain = 0.0
        for x in values:
            if not -1.0 <= x <= 1.0:
                raise ConfigError(f"an observation of {name} is {x}; it must be within -1 and 1")
            gain += math.log1p(STAKE * x)
        now = max(0.0, self.capital.get(name, 0.0)) + gain
        self.capital[name] = max(0.0, now)
        return now > math.log(self.run_length)


def contrast(measured: float, allowed: float) -> float:
    """(measured - allowed) / (measured + allowed) of two sizes that are not negative; 0 where both are 0.

    Where `measured` is drawn as `allowed` is, or smaller, the mean is at most 0: exchanging the two turns the sign.
    """
    return 0.0 if measured == allowed else (measured - allowed) / (measured + allowed)
