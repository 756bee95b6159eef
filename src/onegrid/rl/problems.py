"""Which problems a run learns from, by configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from onegrid.errors import ConfigError
from onegrid.rl.examples import DataConfig
from onegrid.rl.scoring import ScoringConfig
from onegrid.rl.tasks import ArithmeticTask, Task, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """The built-in arithmetic, any generator of reasoning-gym, or files."""

    name: Literal["arithmetic", "reasoning_gym", "dataset"] = "arithmetic"
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
    data: DataConfig = field(default_factory=DataConfig)
    """dataset: the files."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    """dataset: the rewards."""

    def __post_init__(self) -> None:
        if self.name == "reasoning_gym" and not self.generator:
            raise ConfigError('task.generator is missing; name a generator of reasoning-gym, such as "chain_sum"')
        if self.name != "reasoning_gym" and (self.generator or self.settings):
            raise ConfigError(f'task.generator and task.settings need task.name = "reasoning_gym"; it is "{self.name}"')
        if (self.name == "dataset") != bool(self.data.files):
            raise ConfigError(
                f'task.data.files names {len(self.data.files)} files, and task.name is "{self.name}"; '
                'files need task.name = "dataset", which needs at least one'
            )


def at_folder(config: TaskConfig, base: Path) -> TaskConfig:
    """The configuration with every file name absolute: relative ones start at `base`."""

    def resolved(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str((base / name).resolve()) for name in names)

    data = replace(config.data, files=resolved(config.data.files), eval_files=resolved(config.data.eval_files))
    rewards = tuple(
        replace(reward, function=str((base / reward.function).resolve())) if ".py:" in reward.function else reward
        for reward in config.scoring.rewards
    )
    return replace(config, data=data, scoring=replace(config.scoring, rewards=rewards))


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
    if config.name == "dataset":
        from onegrid.rl.dataset import DatasetTask

        return DatasetTask(
            config.data,
            tokenizer,
            num_prompts=num_prompts,
            seed=seed,
            scoring=config.scoring,
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
