"""From completions to rewards. What cannot be scored is neither right nor wrong: it is masked and counted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from onegrid.errors import TaskError

if TYPE_CHECKING:  # a process that only scores should not have to load torch
    from onegrid.rl.tasks import Prompt, Task
    from onegrid.types import Group, Problem, Rollout

INTEGER = re.compile(r"0|-?[1-9][0-9]*")
MAX_REASON = 200
"""Characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a verifier says about one completion."""

    reward: float | None
    """None if it could not be scored."""
    reason: str = ""
    """Why it could not."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Where several rewards are added up: each by name, before its weight, without those that failed or do not
    apply."""


def verify_integer(completion: str, answer: str) -> Verdict:
    """1 if the completion, stripped of spaces around it, is the answer written as a plain integer; 0 for anything else.

    Strict: "046", "+46", "46.0", "46 46" are wrong for 46, as are digits of other scripts. A label that is not a plain
    integer itself is unscorable.
    """
    label = str(answer).strip(" ")
    if not INTEGER.fullmatch(label):
        return Verdict(reward=None, reason=f"the label {answer!r} is not a plain integer")
    text = completion.strip(" ")
    return Verdict(reward=float(INTEGER.fullmatch(text) is not None and text == label))


def said(error: BaseException) -> str:
    """Kind and message of an error of foreign code, of at most MAX_REASON characters."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ is foreign code too
        text = type(error).__name__
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def at_threshold(score: float | None, threshold: float) -> float | None:
    """1 from the threshold on, 0 below; None and NaN are unscorable."""
    if score is None or math.isnan(score):
        return None
    return float(score >= threshold)


class PendingVerdicts(Protocol):
    """Verdicts that are being made elsewhere."""

    def verdicts(self) -> list[Verdict]:
        """All of them, in order, once they are there."""
        ...


@runtime_checkable
class Submits(Protocol):
    """A task whose verifier works in other processes."""

    def submit(self, answered: Sequence[tuple[Prompt, str]]) -> PendingVerdicts:
        """Begin to score completions of one group, and return at once."""
        ...


class Scorer:
    """Scores the groups of one call of the sampler, each as soon as it is whole.

    task        one that can `submit` scores all groups at the same time, and while others are generated
    prompts     those that the rollouts answer, found by prompt_index
    group_size  rollouts of each prompt
    """

    def __init__(self, task: Task, prompts: Iterable[Prompt], *, group_size: int) -> None:
        self._task, self._size = task, group_size
        self._prompts = {prompt.prompt_index: prompt for prompt in prompts}
        self._ended: dict[int, list[Rollout]] = {}
        self._begun: dict[int, Callable[[], list[Verdict]]] = {}

    def finished(self, rollout: Rollout) -> None:
        """Takes one rollout; the last of its group has the group scored. In any order, by a sampler that tells."""
        index = rollout.request.prompt_index
        ended = self._ended.setdefault(index, [])
        ended.append(rollout)
        if len(ended) == self._size:
            self._begun[index] = self._begin(sorted(self._ended.pop(index), key=lambda r: r.request.sample))

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with every rollout scored. A rollout whose verifier raised, or gave None or NaN or Inf, has reward
        None. What `finished` has not seen whole is scored now.

        Raises TaskError if there are rollouts and none could be scored: that is a broken verifier, not a weak model.
        """
        for group in groups:
            if group.group_id not in self._begun:
                self._begun[group.group_id] = self._begin(group.rollouts)
        reasons: list[str] = []
        scored = []
        for group in groups:
            verdicts = self._begun[group.group_id]()
            rollouts = [_scored(r, v, reasons) for r, v in zip(group.rollouts, verdicts, strict=True)]
            problem = _problem(self._prompts[group.group_id])
            scored.append(replace(group, rollouts=tuple(rollouts), problem=problem))
        num_rollouts = sum(len(group.rollouts) for group in groups)
        if num_rollouts and len(reasons) == num_rollouts:
            raise TaskError(f"none of {num_rollouts} rollouts could be scored; the first because: {reasons[0]}")
        return scored

    def _begin(self, rollouts: Sequence[Rollout]) -> Callable[[], list[Verdict]]:
        task, answered = self._task, [(_prompt_of(r, self._prompts), r.text) for r in rollouts]
        if isinstance(task, Submits):
            return task.submit(answered).verdicts
        return lambda: [_verdict(task, prompt, text) for prompt, text in answered]


def score_rollouts(task: Task, groups: Sequence[Group], *, prompts: Iterable[Prompt]) -> list[Group]:
    """`Scorer.scored` of groups that are all there."""
    return Scorer(task, prompts, group_size=0).scored(groups)


def _prompt_of(rollout: Rollout, by_index: dict[int, Prompt]) -> Prompt:
    index = rollout.request.prompt_index
    if index not in by_index:
        raise TaskError(
            f"a rollout answers prompt {index}, which is not among the {len(by_index)} prompts of this step"
        )
    return by_index[index]


def _verdict(task: Task, prompt: Prompt, text: str) -> Verdict:
    try:
        reward = task.score(prompt, text)
    except Exception as error:  # verifiers are foreign code; a fault is counted, and one everywhere fails the run
        return Verdict(reward=None, reason=said(error))
    return Verdict(reward=reward, reason="" if reward is not None else "the verifier gave no score")


def _scored(rollout: Rollout, verdict: Verdict, reasons: list[str]) -> Rollout:
    reward, reason = verdict.reward, verdict.reason
    if reward is not None and not math.isfinite(reward):
        reward, reason = None, f"the verifier gave {reward}"
    if reward is None:
        reasons.append(f"{reason} (prompt {rollout.request.prompt_index}, sample {rollout.request.sample})")
    return replace(rollout, reward=reward, scored=True, rewards=dict(verdict.parts))


def _problem(prompt: Prompt) -> Problem:
    """A task that has no labels of its own kind is scored by all that its entry says."""
    from onegrid.types import Problem  # brings torch, which processes that score do without

    entry = prompt.entry
    if "label" not in entry:
        return Problem(data_source=prompt.data_source, ground_truth=prompt.answer, extra_info=entry)
    return Problem(data_source=prompt.data_source, ground_truth=entry["label"], extra_info=entry["extra_info"])
