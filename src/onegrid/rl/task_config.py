"""Which task a run learns from, by name and settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onegrid.errors import ConfigError
from onegrid.rl.reasoning import ReasoningGymTask
from onegrid.rl.tasks import ArithmeticTask, Task, Tokenizer

LIBRARY = "reasoning_gym/"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """The task of one run."""

    name: str = "arithmetic"
    """"arithmetic", or "reasoning_gym/" and the name of one of its generators, such as "reasoning_gym/chain_sum"."""
    settings: dict[str, object] = field(default_factory=dict)
    """Of arithmetic: `digits`, `operations`. Of a generator: its own options without `seed` and `size`."""
    num_prompts: int = 64
    """Problems a step."""
    threshold: float = 1.0
    """Partial credit from here on is reward 1, below it 0. Arithmetic knows only right and wrong."""


def make_task(config: TaskConfig, tokenizer: Tokenizer, *, seed: int, bos_token_id: int | None) -> Task:
    """The task itself. ConfigError for an unknown name or setting, TaskError where a library is missing."""
    if config.name.startswith(LIBRARY):
        return ReasoningGymTask(
            config.name.removeprefix(LIBRARY),
            tokenizer,
            num_prompts=config.num_prompts,
            seed=seed,
            settings=config.settings,
            threshold=config.threshold,
            bos_token_id=bos_token_id,
        )
    if config.name != ArithmeticTask.name:
        raise ConfigError(f'name is "{config.name}"; give "arithmetic" or "{LIBRARY}" and the name of a generator')
    return ArithmeticTask(
        tokenizer,
        num_prompts=config.num_prompts,
        seed=seed,
        bos_token_id=bos_token_id,
        **_arithmetic(config.settings),
    )


def _arithmetic(settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings, checked by name and type."""
    for key, value in settings.items():
        if key == "digits":
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"settings.digits is {value!r}; it must be an integer")
        elif key == "operations":
            if not isinstance(value, list | tuple):
                raise ConfigError(f'settings.operations is {value!r}; it must be a list such as ["+", "-"]')
        else:
            near = difflib.get_close_matches(key, ("digits", "operations"), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "arithmetic has digits and operations"
            raise ConfigError(f"unknown key 'settings.{key}'; {hint}")
    return dict(settings)
