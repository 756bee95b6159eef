"""How far learner and sampler are apart, and how sure we are of it."""

from onegrid.mismatch.metrics import compare, mirror_rollout_corr
from onegrid.mismatch.statistics import (
    Interval,
    PromptSums,
    Reduction,
    kl_reduction,
    mean_with_interval,
    pool,
    sum_by_prompt,
)

__all__ = [
    "Interval",
    "PromptSums",
    "Reduction",
    "compare",
    "kl_reduction",
    "mean_with_interval",
    "mirror_rollout_corr",
    "pool",
    "sum_by_prompt",
]
