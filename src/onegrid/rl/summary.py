"""What the rollouts of a step were like: `rollout/` metrics of all that was generated, masked from the loss or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onegrid.types import Group


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths, truncation and variety over all rollouts of scored groups; empty without rollouts.

    Lengths count generated tokens, whether they are masked from the loss or not. Reward mean and (unbiased) std are
    over rollouts that could be scored, and absent if none (or, for the std, one) could; so are those of each of several
    rewards, before its weight, as `rollout/reward/<name>`. `rollout/distinct_answers` is
    the mean over groups of different texts / rollouts. `rollout/constant_groups` is the share of groups that teach
    nothing.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [r.tokens_R.numel() for r in rollouts]
    full = [group for group in groups if group.rollouts]
    metrics = {
        "rollout/num": float(len(rollouts)),
        "rollout/response_length": sum(lengths) / len(lengths),
        "rollout/response_length_min": float(min(lengths)),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_share": sum(r.finish == "length" for r in rollouts) / len(rollouts),
        "rollout/unscorable": float(len(rollouts) - len(rewards)),
        "rollout/distinct_answers": math.fsum(len({r.text for r in g.rollouts}) / len(g.rollouts) for g in full)
        / len(full),
        "rollout/constant_groups": sum(not is_informative(group) for group in full) / len(full),
    }
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics["rollout/raw_reward"] = mean
        if len(rewards) > 1:
            variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
            metrics["rollout/raw_reward_std"] = math.sqrt(variance)
    for name in dict.fromkeys(name for r in rollouts for name in r.rewards):
        given = [r.rewards[name] for r in rollouts if name in r.rewards]
        metrics[f"rollout/reward/{name}"] = math.fsum(given) / len(given)
    return metrics


def is_informative(group: Group) -> bool:
    """Whether the rewards of a group differ at all; only then has it an advantage other than 0."""
    rewards = [r.reward for r in group.rollouts if r.reward is not None]
    return bool(rewards) and max(rewards) != min(rewards)
