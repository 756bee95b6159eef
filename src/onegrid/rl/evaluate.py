"""Greedy accuracy on problems that no training sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onegrid.errors import ConfigError
from onegrid.rl.batch import group_rollouts, make_requests
from onegrid.rl.rewards import score_rollouts
from onegrid.rl.tasks import Task
from onegrid.sampler.base import Sampler
from onegrid.types import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Greedy accuracy on held-out problems, before and after training."""

    num_problems: int = 256
    every: int = 0
    """Also after every so many steps; 0: only before and after."""

    def __post_init__(self) -> None:
        if self.num_problems < 1 or self.every < 0:
            raise ConfigError(f"num_problems {self.num_problems} must be at least 1 and every {self.every} at least 0")


def evaluate(task: Task, sampler: Sampler, *, num_problems: int, sampling: Sampling) -> dict[str, float]:
    """Mean reward of the most likely answer to each of the first held-out problems, as `eval/held_out/...` metrics.

    sampling  that of training; temperature, top-p and top-k are replaced by the greedy choice
    `accuracy` is over problems that could be scored; `unscorable` counts the others. No randomness takes part.
    """
    prompts = task.held_out(num_problems)
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, record_routing=False)
    rollouts = sampler.generate(make_requests(prompts, 1, seed=0, sampling=greedy))
    groups = score_rollouts(task, group_rollouts(rollouts), prompts=prompts)
    rewards = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
    return {
        "eval/held_out/accuracy": sum(rewards) / len(rewards),
        "eval/held_out/problems": float(len(prompts)),
        "eval/held_out/unscorable": float(len(prompts) - len(rewards)),
        "eval/held_out/truncated_share": sum(r.finish == "length" for r in rollouts) / len(rollouts),
    }
