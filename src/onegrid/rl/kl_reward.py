"""KL in the reward instead of the loss: an answer pays for being far from the reference policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from onegrid.errors import NonFiniteError
from onegrid.types import Group


def kl_in_reward(groups: Sequence[Group], reference_logp: Sequence[Tensor], *, coefficient: float) -> list[Group]:
    """The groups with reward - coefficient x sum over the answer of (sampler - reference log-probability).

    reference_logp  per rollout FP32 [R] nats, in the order of the groups' rollouts, at the sampling temperature
    coefficient     0 changes no reward

    The sum estimates KL(policy to reference) of a whole answer without bias; it is taken in float64. Unscorable
    rollouts stay so. Call it before the advantages. Raises NonFiniteError for NaN or Inf in a scored rollout.
    Sources: Ouyang et al., InstructGPT (2022); Ahmadian et al., RLOO (2024).
    """
    left = iter(reference_logp)
    changed = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            reference_R = next(left)
            if rollout.reward is None or coefficient == 0.0:
                rollouts.append(rollout)
                continue
            kl = float((rollout.logp_R.double() - reference_R.to(rollout.logp_R.device).double()).sum())
            if not abs(kl) < float("inf"):
                raise NonFiniteError(f"the KL of a rollout of group {group.group_id} to the reference is {kl}")
            rollouts.append(replace(rollout, reward=rollout.reward - coefficient * kl))
        changed.append(replace(group, rollouts=tuple(rollouts)))
    if next(left, None) is not None:
        raise ValueError("more reference log-probabilities than rollouts")
    return changed
