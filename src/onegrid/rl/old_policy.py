"""What the learner's probability ratio is taken to, and the correction for a sampler that is not quite the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from onegrid.errors import ConfigError
from onegrid.learner.learner import Learner
from onegrid.rl.correction import capped_share, correction_weights
from onegrid.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """Importance correction of sampler to learner."""

    mode: Literal["off", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"] = "off"
    """"off" takes the ratio to the sampler's own log-probabilities, which in an exact pairing are the learner's."""
    cap: float = 2.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.cap < float("inf"):
            raise ConfigError(f"cap is {self.cap}; it must be at least 1 and finite")


def old_policy(
    learner: Learner, batch: Batch, config: CorrectionConfig
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """Arguments of `Learner.forward_backward`, and metrics.

    A correction takes one more forward pass, for the old log-probabilities. For tokens of an older version they are
    those of the learner before this update, and the weights lead from the version that sampled to it.
    """
    if config.mode == "off":
        return {}, {}
    old_logp = learner.log_probs(batch)
    mask = [s.mask_R.to(learner.device) for s in batch.sequences]
    weights = correction_weights(
        old_logp,
        [s.sampler_logp_R.to(learner.device) for s in batch.sequences],
        mask=mask,
        mode=config.mode,
        cap=config.cap,
    )
    return {"old_logp": old_logp, "correction": weights}, capped_share(weights, mask=mask, cap=config.cap)
