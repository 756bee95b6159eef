"""What one update learns from: the scored groups of a step, made into a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onegrid.learner.learner import Learner
from onegrid.rl.advantage import advantages_of
from onegrid.rl.batch import pack
from onegrid.rl.dynamic import Drawn
from onegrid.rl.kl_reward import kl_in_reward
from onegrid.rl.loop_config import LoopConfig
from onegrid.rl.summary import is_informative, rollout_metrics
from onegrid.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Groups of one step with what follows from them and from the policy of the start alone."""

    drawn: Drawn
    batch: Batch
    reference_logp: list[Tensor] | None
    """FP32 [R] per sequence of the batch, where the step compares with the reference."""
    informative: bool
    """Whether any group has an advantage other than 0."""
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        """Response tokens that were generated for it."""
        return sum(r.tokens_R.numel() for group in self.drawn.generated for r in group.rollouts)


def make_experience(
    drawn: Drawn, step: int, *, config: LoopConfig, temperature: float, reference: Learner | None
) -> Experience:
    """Advantages and batch of what was drawn; log-probabilities of the reference first, since rewards may need them.

    temperature  that of the sampler
    """
    groups, reference_logp = drawn.groups, None
    metrics = rollout_metrics(drawn.generated)
    if reference is not None and config.reference_every and step % config.reference_every == 0:
        num = sum(len(group.rollouts) for group in groups)
        reference_logp = reference.log_probs(pack(groups, [0.0] * num, temperature=temperature))
    if config.kl_in_reward and reference_logp is not None:
        groups = tuple(kl_in_reward(groups, reference_logp, coefficient=config.kl_in_reward))
        rewards = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
        if rewards:
            metrics["rollout/reward_with_kl"] = sum(rewards) / len(rewards)
    batch = pack(groups, advantages_of(groups, config.advantage), truncated=config.truncated, temperature=temperature)
    return Experience(
        drawn=drawn,
        batch=batch,
        reference_logp=reference_logp,
        informative=any(is_informative(group) for group in groups),
        metrics=metrics,
    )
