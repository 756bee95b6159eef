"""Problems of reasoning-gym: any of its generators by name and settings. The only file that knows the library."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.rewards import at_threshold
from onegrid.rl.tasks import ATTEMPT_STRIDE, Prompt, Tokenizer, encode_prompt, is_held_out, task_random

MAX_BLOCKS = 32
"""A step gives up after so many blocks of problems that were all held out, empty or repeated."""


class ReasoningGymTask:
    """Problems of one generator, endless, with the held-out ones set apart by a hash of the question."""

    def __init__(
        self,
        generator: str,
        tokenizer: Tokenizer,
        *,
        num_prompts: int,
        seed: int,
        settings: Mapping[str, Any],
        threshold: float = 1.0,
        template: str = "{question}\n",
        bos_token_id: int | None = None,
    ) -> None:
        """One generator with its settings.

        generator  name in reasoning-gym, such as "chain_sum"
        settings   its own options, without `seed` and `size`, which the run gives
        threshold  the library gives partial credit from 0 to 1; the reward is 1 from here on, 0 below
        template   the prompt; {question} is replaced by the question
        Raises TaskError without the library (extra `tasks`), ConfigError for an unknown name or setting.
        """
        if not 0.0 < threshold <= 1.0:
            raise ConfigError(f"threshold is {threshold}; it must be above 0 and at most 1")
        if num_prompts < 1:
            raise ConfigError(f"the task was asked for {num_prompts} prompts a step; it must be at least 1")
        if "{question}" not in template:
            raise ConfigError(f"template is {template!r}; it must contain {{question}}")
        reserved = sorted({"seed", "size"} & set(settings))
        if reserved:
            raise ConfigError(f"settings has {reserved}; the run gives these, leave them out")
        self.name = f"reasoning_gym/{generator}"
        self._create = _generator(generator, dict(settings))
        self._scorer = self._create(seed=0, size=64)
        self._tokenizer = tokenizer
        self._num_prompts = num_prompts
        self._seed = seed
        self._threshold = threshold
        self._template = template
        self._bos_token_id = bos_token_id

    def prompts(self, step: int, attempt: int = 0) -> list[Prompt]:
        """The training problems of a step. TaskError if the generator gives too few."""
        first = step * self._num_prompts + attempt * ATTEMPT_STRIDE
        found: list[Prompt] = []
        for entry in self._entries(self._num_prompts, "train", self._seed, step, attempt):
            if not is_held_out(entry["question"]):
                found.append(self._prompt(first + len(found), entry))
                if len(found) == self._num_prompts:
                    return found
        raise TaskError(
            f"{self.name} gave {len(found)} training problems for step {step}, of {self._num_prompts} asked for; "
            "choose a generator or settings with more different problems, or fewer prompts a step"
        )

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out problems, all different. TaskError if the generator gives too few."""
        found: dict[str, Prompt] = {}
        if n == 0:
            return []
        for entry in self._entries(n, "held-out"):
            question = entry["question"]
            if is_held_out(question) and question not in found:
                found[question] = self._prompt(len(found), entry)
                if len(found) == n:
                    return list(found.values())
        raise TaskError(
            f"{self.name} gave {len(found)} different held-out problems of {n} asked for; "
            "ask for fewer, or choose a generator or settings with more different problems"
        )

    def score(self, prompt: Prompt, text: str) -> float | None:
        """1 if the library's score of the completion, white space around it aside, reaches the threshold, else 0."""
        score = self._scorer.score_answer(answer=text.strip(), entry=dict(prompt.entry))
        return at_threshold(score, self._threshold)

    def _entries(self, n: int, *parts: object) -> Iterator[dict[str, Any]]:
        """Blocks of problems, each from its own seed: the library makes neighbours of neighbouring seeds."""
        size = 2 * n + 64
        for block in range(MAX_BLOCKS):
            dataset = self._create(seed=task_random(self.name, *parts, block).randrange(2**31), size=size)
            for i in range(size):
                entry = dataset[i]
                if entry.get("question"):
                    yield entry

    def _prompt(self, index: int, entry: dict[str, Any]) -> Prompt:
        text = self._template.replace("{question}", entry["question"])
        tokens = encode_prompt(text, self._tokenizer, bos_token_id=self._bos_token_id)
        return Prompt(
            prompt_index=index,
            text=text,
            tokens=tokens,
            answer=str(entry.get("answer")),
            data_source=self.name,
            entry=entry,
        )


def _generator(name: str, settings: dict[str, Any]) -> Callable[..., Any]:
    """A function of seed and size that makes the data set."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(
            f'the task "{name}" needs reasoning-gym, which is not installed: pip install "onegrid[tasks]" ({error})'
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise ConfigError(f'generator is "{name}", which reasoning-gym does not have; {hint}')

    def create(*, seed: int, size: int) -> Any:
        try:
            return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
        except (TypeError, ValueError, AssertionError) as error:  # what its configurations raise for a bad option
            raise ConfigError(f'settings {settings} do not suit the generator "{name}": {error}') from error

    return create
