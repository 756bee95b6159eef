"""How sure we are: pooled sums over prompts, and the bootstrap over prompts, paired across arms.

Tokens of one completion, and completions of one prompt, are not independent; prompts are. So prompts are what is drawn
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onegrid.errors import EmptyBatchError, NonFiniteError, TaskError

NUM_RESAMPLES = 10_000
LEVEL = 0.95
_DRAWS_AT_ONCE = 2_000_000
"""Bounds the memory of one chunk of resamples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its percentile bootstrap interval."""

    estimate: float
    low: float
    high: float
    level: float

    def excludes(self, value: float) -> bool:
        """True if the value lies outside the interval."""
        return value < self.low or value > self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How much lower the second arm is than the first."""

    absolute: Interval
    """First minus second, in the unit of the values (nats)."""
    relative: Interval | None
    """1 - second / first, or None where the first arm's mean is not above 0 in the data and in every resample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSums:
    """Per prompt: sum of a token value, and how many tokens it was summed over. Plain sums, so that steps pool."""

    prompt_ids_P: NDArray[np.int64]
    """Ascending, without repeats."""
    total_P: NDArray[np.float64]
    num_tokens_P: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Mean over all tokens of all prompts. Raises EmptyBatchError if there are none."""
        if not self.num_tokens_P.sum():
            raise EmptyBatchError(f"{self.prompt_ids_P.size} prompts with 0 tokens; a mean needs at least one")
        return float(self.total_P.sum() / self.num_tokens_P.sum())


def sum_by_prompt(values: Sequence[Tensor], prompt_ids: Sequence[int], *, mask: Sequence[Tensor]) -> PromptSums:
    """Sums of a value per token, by prompt, in float64; for the k1 KL the value is sampler - learner log-probability.

    values      per sequence [R]
    prompt_ids  the prompt of each sequence
    mask        per sequence bool [R]; a prompt with no chosen token is left out
    Raises NonFiniteError for NaN or Inf under the mask.
    """
    sums: dict[int, tuple[float, int]] = {}
    for x_R, prompt_id, mask_R in zip(values, prompt_ids, mask, strict=True):
        x_N = x_R.detach().cpu()[mask_R.detach().cpu().bool()].double().numpy()
        if not np.isfinite(x_N).all():
            count = int((~np.isfinite(x_N)).sum())
            raise NonFiniteError(f"prompt {prompt_id}: {count} of {x_N.size} chosen values are NaN or Inf")
        if x_N.size:
            total, num = sums.get(prompt_id, (0.0, 0))
            sums[prompt_id] = (total + float(x_N.sum()), num + x_N.size)
    return _from_dict(sums)


def pool(parts: Sequence[PromptSums]) -> PromptSums:
    """Several steps as one: sums of the same prompt are added."""
    sums: dict[int, tuple[float, int]] = {}
    for part in parts:
        for prompt_id, total, num in zip(part.prompt_ids_P, part.total_P, part.num_tokens_P, strict=True):
            old_total, old_num = sums.get(int(prompt_id), (0.0, 0))
            sums[int(prompt_id)] = (old_total + float(total), old_num + int(num))
    return _from_dict(sums)


def kl_reduction(
    first: PromptSums, second: PromptSums, *, seed: int, num_resamples: int = NUM_RESAMPLES, level: float = LEVEL
) -> Reduction:
    """How much lower the token mean of the second arm is, with a percentile interval from resampled prompts.

    Both arms must have seen the same prompts (TaskError names some that only one saw); every resample draws the same
    prompts for both, so that what the arms share cancels. Raises EmptyBatchError without prompts.
    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 8 and 13.
    """
    if not np.array_equal(first.prompt_ids_P, second.prompt_ids_P):
        alone = np.setxor1d(first.prompt_ids_P, second.prompt_ids_P)
        raise TaskError(
            f"{alone.size} prompts were seen by one arm only, the first {alone[:5].tolist()}; "
            "a paired comparison needs the same prompts in both arms"
        )
    a, b = first.mean, second.mean
    a_S, b_S = _resampled_means((first, second), seed=seed, num_resamples=num_resamples)
    relative = None
    if a > 0 and (a_S > 0).all():
        relative = _interval(1.0 - b / a, 1.0 - b_S / a_S, level)
    return Reduction(absolute=_interval(a - b, a_S - b_S, level), relative=relative)


def mean_with_interval(
    values: Sequence[float], *, seed: int, num_resamples: int = NUM_RESAMPLES, level: float = LEVEL
) -> Interval:
    """Mean of independent values (prompts, seeds, runs), with a percentile bootstrap interval.

    One value gives an interval of width 0, which says nothing. Raises EmptyBatchError for none, NonFiniteError for NaN
    or Inf.
    """
    x_P = np.asarray(values, dtype=np.float64)
    if x_P.size == 0:
        raise EmptyBatchError("a mean of 0 values was asked for; it needs at least one")
    if not np.isfinite(x_P).all():
        raise NonFiniteError(f"{int((~np.isfinite(x_P)).sum())} of {x_P.size} values are NaN or Inf")
    each = PromptSums(
        prompt_ids_P=np.arange(x_P.size, dtype=np.int64), total_P=x_P, num_tokens_P=np.ones(x_P.size, dtype=np.int64)
    )
    (mean_S,) = _resampled_means((each,), seed=seed, num_resamples=num_resamples)
    return _interval(float(x_P.mean()), mean_S, level)


def _from_dict(sums: dict[int, tuple[float, int]]) -> PromptSums:
    ids = sorted(sums)
    return PromptSums(
        prompt_ids_P=np.array(ids, dtype=np.int64),
        total_P=np.array([sums[i][0] for i in ids], dtype=np.float64),
        num_tokens_P=np.array([sums[i][1] for i in ids], dtype=np.int64),
    )


def _resampled_means(arms: tuple[PromptSums, ...], *, seed: int, num_resamples: int) -> list[NDArray[np.float64]]:
    """Token mean of each arm in each resample; all arms with the same draws."""
    generator = np.random.default_rng(seed)
    num_prompts = arms[0].prompt_ids_P.size
    at_once = max(1, _DRAWS_AT_ONCE // num_prompts)
    means: list[list[NDArray[np.float64]]] = [[] for _ in arms]
    for start in range(0, num_resamples, at_once):
        draw_SP = generator.integers(0, num_prompts, size=(min(at_once, num_resamples - start), num_prompts))
        for arm, chunks in zip(arms, means, strict=True):
            chunks.append(arm.total_P[draw_SP].sum(axis=1) / arm.num_tokens_P[draw_SP].sum(axis=1))
    return [np.concatenate(chunks) for chunks in means]


def _interval(estimate: float, resampled_S: NDArray[np.float64], level: float) -> Interval:
    tail = 100.0 * (1.0 - level) / 2.0
    low, high = np.percentile(resampled_S, [tail, 100.0 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high), level=level)
