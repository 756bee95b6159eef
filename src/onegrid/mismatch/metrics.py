"""How far learner and sampler are apart, on the same tokens at the same version.

Whole-step numbers from per-sequence log-probabilities, so that micro-batches and ranks cannot change them: callers
gather first and compare once. Everything is computed by numpy in float64 on the CPU, in one thread and in the order
given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onegrid.errors import MismatchError, NonFiniteError

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before the exponential, so that one token cannot make a mean infinite."""

VERL_NAMES = {
    "mismatch/kl": "rollout_corr/kl",
    "mismatch/k3": "rollout_corr/k3_kl",
    "mismatch/log_ppl_abs_diff": "rollout_corr/log_ppl_abs_diff",
    "mismatch/chi2_token": "rollout_corr/chi2_token",
    "mismatch/chi2_seq": "rollout_corr/chi2_seq",
}


def compare(learner_logp: Sequence[Tensor], sampler_logp: Sequence[Tensor], mask: Sequence[Tensor]) -> dict[str, float]:
    """Every `mismatch/` metric of one step, with d = learner - sampler log-probability of the sampled token.

    learner_logp, sampler_logp  per sequence FP32 [R], nats, at the same temperature and version
    mask                        per sequence bool [R]; what masked positions hold cannot matter, be it NaN, Inf or 1e10

    Sequences without a chosen token are left out of sequence means. With no chosen token at all the answer is empty:
    there is nothing to say, and 0 would be a lie. `mismatch/pearson` is absent where the probabilities of one side do
    not vary, unless both sides are the same bits, where it is 1. `mismatch/token_mult_prob_error` is not clamped and
    can be Inf.

    Raises NonFiniteError for NaN or Inf under the mask, MismatchError where shapes or dtypes cannot be compared.
    Sources: k1 and k3 from Schulman, "Approximating KL divergence" (2020); the chi-squared and perplexity terms as verl
    defines them for its sampler correction; effective sample size from Kong (1992).
    """
    learner, sampler = _chosen(learner_logp, sampler_logp, mask)
    if not learner:
        return {}
    p_N, q_N = np.concatenate(learner), np.concatenate(sampler)
    same_N = p_N.view(np.int32) == q_N.view(np.int32)
    d = [p_R.astype(np.float64) - q_R.astype(np.float64) for p_R, q_R in zip(learner, sampler, strict=True)]
    d_N = np.concatenate(d)
    abs_N = np.abs(d_N)
    clamped_N = np.clip(d_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = np.exp(clamped_N)
    sum_B = np.array([d_R.sum() for d_R in d])
    with np.errstate(over="ignore"):  # exp of more than 709 is Inf, which is what it should say
        mult_prob_error = np.exp(abs_N).mean()

    metrics = {
        "mismatch/tokens": d_N.size,
        "mismatch/kl": -d_N.mean(),
        "mismatch/k3": (np.expm1(clamped_N) - clamped_N).mean(),
        "mismatch/log_ppl_abs_diff": np.mean([abs(d_R.mean()) for d_R in d]),
        "mismatch/chi2_token": np.square(ratio_N).mean() - 1.0,
        "mismatch/chi2_seq": np.exp(2.0 * np.clip(sum_B, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)).mean() - 1.0,
        "mismatch/max_abs": abs_N.max(),
        "mismatch/p99": np.percentile(abs_N, 99, method="linear"),
        "mismatch/share_equal": same_N.mean(),
        "mismatch/token_mult_prob_error": mult_prob_error,
        "mismatch/ess": np.square(ratio_N.sum()) / (ratio_N.size * np.square(ratio_N).sum()),
    }
    pearson = 1.0 if same_N.all() else _pearson(np.exp(p_N.astype(np.float64)), np.exp(q_N.astype(np.float64)))
    if pearson is not None:
        metrics["mismatch/pearson"] = pearson
    return {key: float(value) + 0.0 for key, value in metrics.items()}  # + 0.0: no "-0.0" where the two are equal


def mirror_rollout_corr(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same numbers under the names that verl gives them, for the ones that mean exactly the same there."""
    return {theirs: metrics[ours] for ours, theirs in VERL_NAMES.items() if ours in metrics}


def _chosen(
    learner_logp: Sequence[Tensor], sampler_logp: Sequence[Tensor], mask: Sequence[Tensor]
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """The chosen tokens of both sides, sequence by sequence, without the sequences that have none."""
    if not len(learner_logp) == len(sampler_logp) == len(mask):
        raise MismatchError(
            f"{len(learner_logp)} sequences of the learner, {len(sampler_logp)} of the sampler, {len(mask)} masks; "
            "compare the same sequences, in the same order"
        )
    for i, (p_R, q_R, mask_R) in enumerate(zip(learner_logp, sampler_logp, mask, strict=True)):
        if p_R.shape != q_R.shape or p_R.shape != mask_R.shape or p_R.dtype != q_R.dtype or p_R.dtype != torch.float32:
            raise MismatchError(
                f"sequence {i}: learner {tuple(p_R.shape)} {p_R.dtype}, sampler {tuple(q_R.shape)} {q_R.dtype}, "
                f"mask {tuple(mask_R.shape)}; all three need one value per response token, log-probabilities in FP32"
            )
    if not mask:
        return [], []
    ends = np.cumsum([x.numel() for x in mask])[:-1]
    # One copy from the device for each side, not one for each sequence.
    p, q, chosen = (
        np.split(torch.cat(list(x)).detach().cpu().numpy(), ends) for x in (learner_logp, sampler_logp, mask)
    )
    chosen = [m_R.astype(bool) for m_R in chosen]
    learner = [p_R[m_R] for p_R, m_R in zip(p, chosen, strict=True) if m_R.any()]
    sampler = [q_R[m_R] for q_R, m_R in zip(q, chosen, strict=True) if m_R.any()]
    for side, values in (("learner", learner), ("sampler", sampler)):
        bad = [(i, int((~np.isfinite(x_R)).sum())) for i, x_R in enumerate(values)]
        count = sum(n for _, n in bad)
        if count:
            total = sum(x_R.size for x_R in values)
            raise NonFiniteError(
                f"{side} log-probabilities: {count} of {total} chosen tokens are NaN or Inf, in "
                f"{sum(n > 0 for _, n in bad)} of {len(values)} sequences; no metric is computed from them"
            )
    return learner, sampler


def _pearson(x_N: NDArray[np.float64], y_N: NDArray[np.float64]) -> float | None:
    """Correlation, two passes; None where one side does not vary."""
    if x_N.max() == x_N.min() or y_N.max() == y_N.min():  # rounding residue of equal values is not a variance
        return None
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    spread = float(np.sqrt(np.square(x_N).sum()) * np.sqrt(np.square(y_N).sum()))
    if spread == 0.0:  # so small that the squares are 0
        return None
    return min(1.0, max(-1.0, float((x_N * y_N).sum()) / spread))
