"""The groups of a step: sampled, scored and, with dynamic sampling, drawn again where they teach nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from onegrid.rl.clock import Clock
from onegrid.rl.dynamic import Drawn, DynamicConfig, draw_groups
from onegrid.rl.loop_config import LoopConfig
from onegrid.rl.scored import scored_groups
from onegrid.rl.tasks import Task
from onegrid.sampler.base import Sampler
from onegrid.types import Group, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """All that the groups of a step depend on, weights aside."""

    task: Task
    sampler: Sampler
    config: LoopConfig
    dynamic: DynamicConfig
    sampling: Sampling
    seed: int

    def groups(self, step: int, clock: Clock) -> Drawn:
        """The groups of a step. TaskError for a task without problems, or where no rollout could be scored."""

        def attempt(number: int) -> list[Group]:
            return scored_groups(
                self.task,
                self.sampler,
                self.task.prompts(step, number),
                self.config.samples_per_prompt,
                sampling=self.sampling,
                seed=step_seed(self.seed, step),
                clock=clock,
            )

        return draw_groups(attempt, num_groups=self.config.prompts_per_step, config=self.dynamic)


def step_seed(seed: int, step: int) -> int:
    """Seed of the requests of one step, from that of the run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=7).digest(), "little")
