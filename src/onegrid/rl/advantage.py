"""From rewards to advantages, by group id: a rollout is judged against the others of its prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from onegrid.errors import ConfigError, NonFiniteError, TaskError
from onegrid.types import Group

ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def group_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[int], estimator: str = "grpo", eps: float = 1e-6
) -> list[float | None]:
    """Advantage of every rollout, in the order given; None where the reward is None (unscorable).

    estimator  "grpo": (r - mean) / (std + eps), with the unbiased std (Shao et al., DeepSeekMath (2024))
               "dr_grpo": r - mean (Liu et al., "Understanding R1-Zero-Like Training" (2025))
               "rloo": r - mean of the others (Kool et al. (2019); Ahmadian et al. (2024))

    Groups are the equal ids, wherever they stand and however many. A constant group (max == min) and a group of one
    scored rollout give exactly 0. Float64, two passes, sums exactly rounded: the order of the rollouts changes no bit.
    Raises NonFiniteError for a NaN or Inf reward, ConfigError for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f'the advantage estimator is "{estimator}"; allowed are {", ".join(ESTIMATORS)}')
    groups: dict[int, list[float]] = defaultdict(list)
    for reward, group_id in zip(rewards, group_ids, strict=True):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise NonFiniteError(f"a reward of group {group_id} is {reward}; use None for what cannot be scored")
        groups[group_id].append(float(reward))
    baselines = {group_id: _baseline(values) for group_id, values in groups.items()}
    advantages: list[float | None] = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        if reward is None:
            advantages.append(None)
            continue
        num, mean, std = baselines[group_id]
        if std == 0.0:
            advantages.append(0.0)
        elif estimator == "grpo":
            advantages.append((reward - mean) / (std + eps))
        elif estimator == "dr_grpo":
            advantages.append(reward - mean)
        else:
            advantages.append((reward - mean) * (num / (num - 1)))
    return advantages


def advantages_of(groups: Sequence[Group], estimator: str = "grpo", eps: float = 1e-6) -> list[float | None]:
    """`group_advantages` of scored groups, in the order of their rollouts. TaskError if one was not scored."""
    rollouts = [(rollout, group.group_id) for group in groups for rollout in group.rollouts]
    unscored = sum(not rollout.scored for rollout, _ in rollouts)
    if unscored:
        raise TaskError(f"{unscored} of {len(rollouts)} rollouts have not been scored; call score_rollouts first")
    return group_advantages([r.reward for r, _ in rollouts], [i for _, i in rollouts], estimator, eps)


def _baseline(rewards: list[float]) -> tuple[int, float, float]:
    """Number, mean and unbiased std; std is exactly 0 for a single or constant group, and only there."""
    num = len(rewards)
    mean = math.fsum(rewards) / num
    if max(rewards) == min(rewards):
        return num, mean, 0.0
    return num, mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (num - 1))
