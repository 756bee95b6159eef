"""Problems to learn from: what a task must give, the split between training and held-out problems, and arithmetic.

The split is a property of a problem's text, not of a seed or an index: no run, no restart and no supervised start can
train on a held-out problem by accident.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.rewards import verify_integer

HELD_OUT_SHARE = 5
"""One problem in so many is held out."""
ATTEMPT_STRIDE = 2**40
"""Prompt indices of the k-th redraw of a step lie k times this further, so that no two prompts of a run share one."""


class Tokenizer(Protocol):
    """What a task needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, ready for the sampler."""

    prompt_index: int
    """Position in the task's order: step x prompts a step + place, so unique in a run; held-out ones count from 0."""
    text: str
    tokens: tuple[int, ...]
    """At least one."""
    answer: str
    data_source: str
    entry: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the task's verifier needs."""


class Task(Protocol):
    """A source of problems and the verifier of their answers."""

    def prompts(self, step: int, attempt: int = 0) -> list[Prompt]:
        """The training problems of a step, always the same for one seed, step and attempt; attempts are redraws."""
        ...

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out problems, all different, always the same. TaskError if there are fewer."""
        ...

    def score(self, prompt: Prompt, text: str) -> float | None:
        """Reward of a completion; None if it cannot be scored, which is not the same as wrong."""
        ...


@runtime_checkable
class Summarizes(Protocol):
    """A task that read something and can say what became of it."""

    def summary(self) -> str:
        """In one line."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A task that holds processes or files."""

    def close(self) -> None:
        """Let go of them."""
        ...


@contextmanager
def closing_task(task: Task) -> Iterator[None]:
    """Ends, however the block ends, what the task holds."""
    try:
        yield
    finally:
        if isinstance(task, Closes):
            task.close()


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to the held-out part, by a hash of its text alone."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def task_random(*parts: object) -> random.Random:
    """Random numbers that depend on the parts and on nothing else."""
    return random.Random(":".join(map(str, parts)))


def encode_prompt(text: str, tokenizer: Tokenizer, *, bos_token_id: int | None) -> tuple[int, ...]:
    """Ids of a prompt, after the begin id if there is one. TaskError if that leaves none."""
    tokens = tuple(tokenizer.encode(text))
    tokens = tokens if bos_token_id is None else (bos_token_id, *tokens)
    if not tokens:
        raise TaskError(f"the prompt {text!r} has no tokens; a model needs at least one to continue from")
    return tokens


class ArithmeticTask:
    """Sums such as "12+34=", whose right completion is "46" and nothing else.

    Operands have exactly `digits` digits (one digit: 0 to 9). Problems are drawn with replacement, so training never
    ends.
    """

    name = "arithmetic"
    OPERATIONS = ("+", "-", "*")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_prompts: int,
        seed: int,
        digits: int = 2,
        operations: Sequence[str] = ("+",),
        bos_token_id: int | None = None,
    ) -> None:
        """num_prompts is how many problems a step has; bos_token_id, if given, starts every prompt."""
        unknown = [op for op in operations if op not in self.OPERATIONS]
        if unknown or not operations:
            raise ConfigError(f"operations is {list(operations)}; give one or more of {list(self.OPERATIONS)}")
        if digits < 1:
            raise ConfigError(f"digits is {digits}; it must be at least 1")
        if num_prompts < 1:
            raise ConfigError(f"the task was asked for {num_prompts} prompts a step; it must be at least 1")
        self._tokenizer = tokenizer
        self._bos_token_id = bos_token_id
        self._num_prompts = num_prompts
        self._seed = seed
        self._operations = tuple(dict.fromkeys(operations))
        self._low = 10 ** (digits - 1) if digits > 1 else 0
        self._span = 10**digits - self._low

    @property
    def num_problems(self) -> int:
        """Different problems there are, trained and held out."""
        return len(self._operations) * self._span**2

    def prompts(self, step: int, attempt: int = 0) -> list[Prompt]:
        """The training problems of a step."""
        draws = task_random(self.name, self._seed, step, attempt)
        first = step * self._num_prompts + attempt * ATTEMPT_STRIDE
        found: list[Prompt] = []
        while len(found) < self._num_prompts:
            text, answer = self._problem(draws.randrange(self.num_problems))
            if not is_held_out(text):
                found.append(self._prompt(first + len(found), text, answer))
        return found

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out problems, spread evenly over all operands."""
        stride = round(self.num_problems * (math.sqrt(5) - 1) / 2)
        while math.gcd(stride, self.num_problems) != 1:  # so that the walk meets every problem once
            stride += 1
        found: list[Prompt] = []
        for i in range(self.num_problems):
            if len(found) == n:
                break
            text, answer = self._problem(i * stride % self.num_problems)
            if is_held_out(text):
                found.append(self._prompt(len(found), text, answer))
        if len(found) < n:
            raise TaskError(
                f"{n} held-out problems were asked for, but only {len(found)} of the {self.num_problems} arithmetic "
                "problems are held out; ask for fewer, or give the task more digits or operations"
            )
        return found

    def score(self, prompt: Prompt, text: str) -> float | None:
        """1 if the completion is the integer and nothing else, otherwise 0."""
        return verify_integer(text, prompt.answer).reward

    def _problem(self, index: int) -> tuple[str, str]:
        index, b = divmod(index, self._span)
        which, a = divmod(index, self._span)
        a, b, operation = a + self._low, b + self._low, self._operations[which]
        result = a + b if operation == "+" else a - b if operation == "-" else a * b
        return f"{a}{operation}{b}=", str(result)

    def _prompt(self, index: int, text: str, answer: str) -> Prompt:
        tokens = encode_prompt(text, self._tokenizer, bos_token_id=self._bos_token_id)
        return Prompt(prompt_index=index, text=text, tokens=tokens, answer=answer, data_source=self.name)
