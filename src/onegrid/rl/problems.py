"""Which problems a run learns from, by configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from onegrid.errors import ConfigError
from onegrid.rl.tasks import ArithmeticTask, Task, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """The built-in arithmetic, or any generator of reasoning-gym."""

    name: Literal["arithmetic", "reasoning_gym"] = "arithmetic"
    digits: int = 2
    """arithmetic: digits of both operands."""
    operations: tuple[str, ...] = ("+",)
    """arithmetic: of "+", "-", "*"."""
    generator: str = ""
    """reasoning_gym: name of the generator, such as "chain_sum"."""
    settings: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: the generator's own options."""
    threshold: float = 1.0
    """reasoning_gym: partial credit counts as right from here on."""
    template: str = "{question}\n"
    """reasoning_gym: the prompt around a question."""
    bos_token_id: int | None = None
    """Starts every prompt."""

    def __post_init__(self) -> None:
        if self.name == "reasoning_gym" and not self.generator:
            raise ConfigError('task.generator is missing; name a generator of reasoning-gym, such as "chain_sum"')
        if self.name == "arithmetic" and (self.generator or self.settings):
            raise ConfigError('task.generator and task.settings need task.name = "reasoning_gym"; it is "arithmetic"')


def make_task(config: TaskConfig, tokenizer: Tokenizer, *, num_prompts: int, seed: int) -> Task:
    """The task, giving `num_prompts` training problems a step, drawn by seed."""
    if config.name == "arithmetic":
        return ArithmeticTask(
            tokenizer,
            num_prompts=num_prompts,
            seed=seed,
            digits=config.digits,
            operations=config.operations,
            bos_token_id=config.bos_token_id,
        )
    from onegrid.rl.reasoning import ReasoningGymTask

    return ReasoningGymTask(
        config.generator,
        tokenizer,
        num_prompts=num_prompts,
        seed=seed,
        settings=config.settings,
        threshold=config.threshold,
        template=config.template,
        bos_token_id=config.bos_token_id,
    )
