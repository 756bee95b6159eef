"""DAPO's dynamic sampling: groups whose rewards are all equal teach nothing, so other prompts are drawn in their place.

Bounded, because a task that is solved, or hopeless, would otherwise be drawn for ever.
Source: Yu et al., "DAPO" (2025), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.summary import is_informative
from onegrid.types import Group

ON_EXHAUSTED = ("go_on", "fail")


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicConfig:
    """Dynamic sampling of one run."""

    max_rounds: int = 0
    """Most redraws in one step. 0: no dynamic sampling, every group is kept."""
    on_exhausted: str = "go_on"
    """"go_on" with the groups found, or "fail"."""

    def __post_init__(self) -> None:
        if self.max_rounds < 0:
            raise ConfigError(f"max_rounds is {self.max_rounds}; it must be 0 (off) or more")
        if self.on_exhausted not in ON_EXHAUSTED:
            raise ConfigError(f'on_exhausted is "{self.on_exhausted}"; allowed are {", ".join(ON_EXHAUSTED)}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The groups of a step and what it took to find them."""

    groups: tuple[Group, ...]
    """Those to learn from."""
    generated: tuple[Group, ...]
    """Everything that was sampled, for the metrics of the rollouts."""
    num_constant: int
    """Groups dropped because all their rewards are equal."""
    num_rounds: int
    """Redraws."""
    message: str
    """For the person who follows the run; empty if all is as it should be."""


def draw_groups(draw: Callable[[int], Sequence[Group]], *, num_groups: int, config: DynamicConfig) -> Drawn:
    """As many informative groups as wanted, or as there are after the last round.

    draw        gives scored groups; its argument is the attempt, 0 for the first, and each attempt must use other
                prompts
    num_groups  groups that a step learns from; what is found beyond it is dropped, the last first

    When the rounds are used up: with "go_on" the step learns from the groups found, or, if there are none, from the
    last draw, whose advantages are all 0; with "fail" it raises TaskError. Raises TaskError if a draw gives no group.
    """
    kept: list[Group] = []
    generated: list[Group] = []
    num_constant = 0
    for attempt in range(config.max_rounds + 1):
        groups = list(draw(attempt))
        if not groups:
            raise TaskError(f"attempt {attempt} gave no group at all; the task yields no problem")
        generated += groups
        informative = [group for group in groups if is_informative(group)]
        num_constant += len(groups) - len(informative)
        if config.max_rounds == 0:
            return _drawn(groups, generated, num_constant=num_constant, num_rounds=0)
        kept += informative
        if len(kept) >= num_groups:
            return _drawn(kept[:num_groups], generated, num_constant=num_constant, num_rounds=attempt)
    message = (
        f"only {len(kept)} of {num_groups} groups have rewards that differ, after {config.max_rounds} redraws "
        f"({num_constant} of {len(generated)} groups were constant); the task may be too easy or too hard for the model"
    )
    if config.on_exhausted == "fail":
        raise TaskError(message)
    return _drawn(kept or groups, generated, num_constant=num_constant, num_rounds=config.max_rounds, message=message)


def _drawn(
    groups: Sequence[Group], generated: Sequence[Group], *, num_constant: int, num_rounds: int, message: str = ""
) -> Drawn:
    return Drawn(
        groups=tuple(groups),
        generated=tuple(generated),
        num_constant=num_constant,
        num_rounds=num_rounds,
        message=message,
    )
