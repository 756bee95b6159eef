"""How long a run is, and what one step of it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onegrid.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """How long, and how much a step."""

    num_steps: int = 100
    """Each makes one batch and one update of the weights."""
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    """Completions of one prompt, which are judged against each other; at least 2."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Reward over the mean of its group, divided by the deviation ("grpo") or not ("dr_grpo"); "rloo": over that of the
    others."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether completions that were cut at the cap take part in the loss."""
    off_policy_steps: int = 0
    """Versions between the sampler that makes a batch and the learner that learns from it. 0: none, one after the
    other; 1: the next batch is made while this one is learned, so that every batch after the first is one version
    old."""
    reference_every: int = 1
    """Compare with the policy of the start in every so many steps, at the price of a forward pass; 0: never.
    loss.kl_coefficient and loop.kl_in_reward need every step."""
    kl_in_reward: float = 0.0
    """Taken from the reward of an answer for each nat of its KL to the policy of the start; see rl/kl_reward.py.
    loss.kl_coefficient puts the KL into the loss instead."""
    max_constant_steps: int = 50
    """So many steps in a row without a group whose rewards differ end the run."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_constant_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_steps < 0 or self.reference_every < 0:
            raise ConfigError(f"num_steps {self.num_steps} and reference_every {self.reference_every}: not below 0")
        if self.samples_per_prompt == 1:
            raise ConfigError("samples_per_prompt is 1; a group of one has no advantage, it takes at least 2")
        if not 0.0 <= self.kl_in_reward < float("inf"):
            raise ConfigError(f"kl_in_reward is {self.kl_in_reward}; it must be finite and not negative")
        if self.kl_in_reward and self.reference_every != 1:
            raise ConfigError(
                f"kl_in_reward is {self.kl_in_reward}, which needs the reference in every step: reference_every must "
                f"be 1, not {self.reference_every}"
            )
        if self.off_policy_steps not in (0, 1):
            raise ConfigError(f"off_policy_steps is {self.off_policy_steps}; it can be 0 (on policy) or 1")
