"""Prompts in, scored groups out; a group is scored as soon as its last completion ends, while others still generate."""

from __future__ import annotations

from collections.abc import Sequence

from onegrid.rl.batch import group_rollouts, make_requests
from onegrid.rl.clock import Clock
from onegrid.rl.rewards import Scorer, Submits
from onegrid.rl.tasks import Prompt, Task
from onegrid.sampler.base import Sampler
from onegrid.types import Group, Sampling


def scored_groups(
    task: Task,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    samples: int,
    *,
    sampling: Sampling,
    seed: int,
    first_sample: int = 0,
    clock: Clock | None = None,
) -> list[Group]:
    """`samples` completions of every prompt, by prompt and sample, each with its reward.

    seed          of the requests
    first_sample  their lowest number; a sample's tokens depend on its number, not on how many are asked for
    clock         gets, as stage "scoring", the seconds in which the sampler was done and rewards were not
    The groups do not depend on the order in which completions end. Raises TaskError if none could be scored.
    """
    requests = make_requests(prompts, samples, seed=seed, sampling=sampling, first_sample=first_sample)
    scorer = Scorer(task, prompts, group_size=samples)
    # a task that scores in this process would only hold the sampler up
    rollouts = sampler.generate(requests, scorer.finished) if isinstance(task, Submits) else sampler.generate(requests)
    with (clock or Clock())("scoring"):
        return scorer.scored(group_rollouts(rollouts))
