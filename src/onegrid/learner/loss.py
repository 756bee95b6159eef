"""The policy-gradient loss on flat tokens: sum over tokens of weight times token loss.

The weights are made once for a whole step, by `token_weights`, and are all that knows about sequences and their
number. So a micro-batch or a rank only adds its own tokens: neither the gradient nor a logged number can depend on the
split. Masked tokens are taken out by indexing before any arithmetic; multiplying by 0 would let NaN and Inf through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.errors import ConfigError, NonFiniteError
from onegrid.learner.policy_terms import LOG_RATIO_BOUND, POLICIES

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "dr_grpo")

# Already weighted, so that they add up to the number to log; and sums over tokens, which become means.
_WEIGHTED = ("loss", "pg_loss", "kl_loss", "entropy_loss")
_COUNTED = ("ratio", "ref_kl", "entropy", "clip_low", "clip_high", "clip_dual", "correction")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The loss of one run."""

    policy: str = "ppo"
    """"ppo", "gspo" or "cispo"; see learner/policy_terms.py."""
    aggregation: str = "token_mean"
    """"token_mean", "seq_mean_token_mean" or "dr_grpo"; see `token_weights`."""
    max_len: int | None = None
    """The constant divisor of "dr_grpo", usually the cap on response tokens; for the others None."""
    clip_low: float = 0.2
    """The probability ratio is clipped to 1 - clip_low .. 1 + clip_high; DAPO sets them apart (.2 and .28), GSPO's
    ratio needs them small (3e-4 and 4e-4)."""
    clip_high: float = 0.2
    clip_dual: float | None = None
    """Above 1: the most that a token with negative advantage can cost, in units of its advantage. None: no limit.
    CISPO has none."""
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(learner to reference). The estimate is logged at 0 too."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f'policy is "{self.policy}"; allowed are {", ".join(POLICIES)}')
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(f'aggregation is "{self.aggregation}"; allowed are {", ".join(AGGREGATIONS)}')
        if (self.aggregation == "dr_grpo") != (self.max_len is not None):
            raise ConfigError(
                f'max_len is {self.max_len} with aggregation "{self.aggregation}"; '
                '"dr_grpo" needs it (usually the cap on response tokens) and the others must leave it out'
            )
        if self.max_len is not None and self.max_len < 1:
            raise ConfigError(f"max_len is {self.max_len}; it must be at least 1")
        if not 0.0 <= self.clip_low <= 1.0 or not 0.0 <= self.clip_high < float("inf"):
            raise ConfigError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}; "
                "clip_low must lie in 0 .. 1 and clip_high must be finite and not negative"
            )
        if self.clip_dual is not None and self.policy == "cispo":
            raise ConfigError(f'clip_dual is {self.clip_dual}, but policy "cispo" has no such clip; leave it out')
        if self.clip_dual is not None and not 1.0 < self.clip_dual < float("inf"):
            raise ConfigError(f"clip_dual is {self.clip_dual}; it must be above 1 and finite, or left out")
        for name in ("kl_coefficient", "entropy_coefficient"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and not negative")


def token_weights(masks: Sequence[Tensor], aggregation: str, max_len: int | None = None) -> list[Tensor]:
    """Weight of every token in the loss of one step, per sequence FP32 [R], 0 where masked.

    masks        per sequence bool [R], of all sequences of the step (of all ranks, if there are several)
    aggregation  "token_mean": 1 / chosen tokens of the step
                 "seq_mean_token_mean": 1 / (chosen tokens of the sequence x sequences that have any)
                 "dr_grpo": 1 / (max_len x all sequences, masked ones too), so that no length changes it
                 (Liu et al., "Understanding R1-Zero-Like Training" (2025))

    With no chosen token all weights are 0. Each weight is a float64 quotient rounded once to FP32.
    Raises ConfigError for an unknown aggregation or a max_len that does not go with it.
    """
    LossConfig(aggregation=aggregation, max_len=max_len)  # for its checks
    num_tokens = [int(mask_R.sum()) for mask_R in masks]
    num_sequences = sum(n > 0 for n in num_tokens)
    weights = []
    for mask_R, num in zip(masks, num_tokens, strict=True):
        if num == 0:
            weight = 0.0
        elif aggregation == "token_mean":
            weight = 1.0 / sum(num_tokens)
        elif aggregation == "seq_mean_token_mean":
            weight = 1.0 / (num * num_sequences)
        else:
            assert max_len is not None
            weight = 1.0 / (max_len * len(masks))
        weights.append(torch.zeros(mask_R.shape, device=mask_R.device).masked_fill_(mask_R.bool(), weight))
    return weights


def policy_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    *,
    advantage_N: Tensor,
    weight_N: Tensor,
    mask_N: Tensor,
    config: LossConfig,
    reference_logp_N: Tensor | None = None,
    correction_N: Tensor | None = None,
    entropy_N: Tensor | None = None,
    lengths: Sequence[int] = (),
) -> tuple[Tensor, dict[str, float]]:
    """Loss of some tokens of a step, to be added over its micro-batches, and sums for `loss_metrics`.

    logp_N            FP32 nats, with gradient
    old_logp_N        FP32 nats of the policy that the ratio is taken to; no gradient flows into it
    advantage_N       FP32
    weight_N          from `token_weights` of the whole step
    mask_N            bool; other inputs may hold anything where it is False
    reference_logp_N  FP32 nats of the reference policy; needed if config.kl_coefficient is above 0
    correction_N      importance weights of sampler to learner (rl/correction.py); multiply the policy-gradient term
                      only
    entropy_N         nats, with gradient if config.entropy_coefficient is above 0, where it is needed
    lengths           tokens of every sequence, masked ones too, in order; needed by the policy "gspo"

    Per token: the term of config.policy (learner/policy_terms.py) of logp, old and advantage; plus
    kl_coefficient (expm1(c) - c) with c = reference - logp; minus entropy_coefficient x entropy. FP32, the KL and all
    sums in float64. With every token masked the loss is exactly 0 and so are its gradients.

    Raises NonFiniteError if a chosen token holds NaN or Inf, ConfigError for a missing reference or entropy.
    Source of the KL term: Shao et al., GRPO (2024).
    """
    if config.kl_coefficient > 0 and reference_logp_N is None:
        raise ConfigError(f"loss.kl_coefficient is {config.kl_coefficient}, but no reference log-probabilities came")
    if config.entropy_coefficient > 0 and entropy_N is None:
        raise ConfigError(f"loss.entropy_coefficient is {config.entropy_coefficient}, but no entropy was computed")
    constants = {
        "old_logp": old_logp_N,
        "advantage": advantage_N,
        "weight": weight_N,
        "reference_logp": reference_logp_N,
        "correction": correction_N,
    }
    chosen = {name: x_N.detach()[mask_N.bool()] for name, x_N in constants.items() if x_N is not None}
    chosen["logp"] = logp_N[mask_N.bool()]
    if entropy_N is not None:
        chosen["entropy"] = entropy_N[mask_N.bool()]
    _refuse_non_finite(chosen)
    logp_C, weight_C = chosen["logp"], chosen["weight"]

    terms = POLICIES[config.policy]
    counts = _counts(mask_N, lengths) if config.policy == "gspo" else ()
    pg_C, sums = terms(logp_C, chosen["old_logp"], advantage_C=chosen["advantage"], counts=counts, clips=config)
    if "correction" in chosen:
        pg_C = chosen["correction"] * pg_C
        sums["correction"] = chosen["correction"].double().sum()
    loss = sums["pg_loss"] = (weight_C * pg_C).double().sum()
    if "reference_logp" in chosen:
        c_C = (chosen["reference_logp"].double() - logp_C.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        k3_C = c_C.expm1() - c_C
        sums["ref_kl"] = k3_C.sum()
        if config.kl_coefficient > 0:
            sums["kl_loss"] = config.kl_coefficient * (weight_C * k3_C).sum()
            loss = loss + sums["kl_loss"]
    if "entropy" in chosen:
        sums["entropy"] = chosen["entropy"].double().sum()
        if config.entropy_coefficient > 0:
            sums["entropy_loss"] = -config.entropy_coefficient * (weight_C * chosen["entropy"]).double().sum()
            loss = loss + sums["entropy_loss"]
    sums["loss"] = loss
    row = torch.stack([x.detach().double() for x in sums.values()]).tolist()  # one wait for the device, not ten
    return loss, {"num_tokens": float(logp_C.numel()), **dict(zip(sums, row, strict=True))}


def _counts(mask_N: Tensor, lengths: Sequence[int]) -> list[int]:
    """Chosen tokens of every sequence."""
    if sum(lengths) != mask_N.numel():
        raise ConfigError(
            f"loss.policy needs the lengths of the sequences: {list(lengths)} for {mask_N.numel()} tokens"
        )
    return torch.stack([part.sum() for part in mask_N.bool().split(list(lengths))]).tolist() if lengths else []


def _refuse_non_finite(chosen: Mapping[str, Tensor]) -> None:
    """Raise if a chosen token holds NaN or Inf; names what and how many."""
    counts = torch.stack([(~x_C.isfinite()).sum() for x_C in chosen.values()]).tolist()
    bad = {name: count for name, count in zip(chosen, counts, strict=True) if count}
    if bad:
        found = ", ".join(f"{count} in {name}" for name, count in bad.items())
        raise NonFiniteError(f"NaN or Inf among the {chosen['logp'].numel()} chosen tokens of the loss: {found}")


def loss_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The `train/` metrics of a step from the sums of its micro-batches (and ranks): add, then divide once.

    `train/loss`, `pg_loss`, `kl_loss`, `entropy_loss` are the weighted sums; `train/ratio`, `ref_kl`, `entropy`,
    `clip_low`, `clip_high`, `clip_dual`, `correction` are means over chosen tokens, absent where no token is chosen.
    """
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    metrics = {f"train/{name}": sums[name] for name in _WEIGHTED if name in sums}
    num_tokens = sums.get("num_tokens", 0.0)
    if num_tokens:
        metrics |= {f"train/{name}": sums[name] / num_tokens for name in _COUNTED if name in sums}
    return metrics
