"""How often one of k tries is right, without bias, and how sure we are of a share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from onegrid.errors import ConfigError, EmptyBatchError
from onegrid.mismatch.statistics import LEVEL, Interval, mean_with_interval


def pass_at_k(num_tries: int, num_right: int, k: int) -> float:
    """Chance that at least one of k tries drawn without replacement from num_tries is right, of one problem.

    Unbiased for the chance that one of k fresh tries is right, which 1 - (1 - share)^k is not. As a product, so that
    no factorial overflows. Raises ConfigError unless 0 <= num_right <= num_tries and 1 <= k <= num_tries.
    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (2021), section 2.1.
    """
    if not 0 <= num_right <= num_tries or not 1 <= k <= num_tries:
        raise ConfigError(
            f"pass@{k} of {num_right} right in {num_tries} tries; it takes 1 <= k <= tries, right <= tries"
        )
    if num_tries - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_tries - num_right + 1, num_tries + 1))


def mean_pass_at_k(
    counts: Sequence[tuple[int, int]], k: int, *, seed: int = 0, level: float = LEVEL
) -> Interval | None:
    """Mean of pass@k over problems, with a bootstrap interval over problems.

    counts  (tries that could be scored, right ones) of every problem; those with fewer than k tries are left out
    Where all are 0, or all 1, every resample is the same; then the interval is that of `wilson`, which is not empty.
    None if no problem has k tries.
    """
    values = [pass_at_k(tries, right, k) for tries, right in counts if tries >= k]
    if values and (not any(values) or min(values) == 1.0):
        return wilson(sum(value == 1.0 for value in values), len(values), level=level)
    return mean_with_interval(values, seed=seed, level=level) if values else None


def wilson(num_right: int, num: int, *, level: float = LEVEL) -> Interval:
    """A share of independent problems with Wilson's score interval, which stays in 0 .. 1 and is not empty at the ends.

    Raises EmptyBatchError for 0 problems, ConfigError for more right than there are.
    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference" (1927).
    """
    if num < 1:
        raise EmptyBatchError("a share of 0 problems was asked for; it needs at least one")
    if not 0 <= num_right <= num:
        raise ConfigError(f"{num_right} right of {num} problems")
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    share, spread = num_right / num, z * z / num
    middle = (share + spread / 2.0) / (1.0 + spread)
    half = z / (1.0 + spread) * math.sqrt(share * (1.0 - share) / num + spread / (4.0 * num))
    low = 0.0 if num_right == 0 else max(0.0, middle - half)
    high = 1.0 if num_right == num else min(1.0, middle + half)
    return Interval(estimate=share, low=low, high=high, level=level)
