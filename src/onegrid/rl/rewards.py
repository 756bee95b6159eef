"""From completions to rewards. What cannot be scored is neither right nor wrong: it is masked and counted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onegrid.errors import TaskError
from onegrid.types import Group, Rollout

if TYPE_CHECKING:
    from onegrid.rl.tasks import Prompt, Task

INTEGER = re.compile(r"0|-?[1-9][0-9]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a verifier says about one completion."""

    reward: float | None
    """None if it could not be scored."""
    reason: str = ""
    """Why it could not."""


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


def at_threshold(score: float | None, threshold: float) -> float | None:
    """1 from the threshold on, 0 below; None and NaN are unscorable."""
    if score is None or math.isnan(score):
        return None
    return float(score >= threshold)


def score_rollouts(task: Task, groups: Sequence[Group], *, prompts: Iterable[Prompt]) -> list[Group]:
    """The groups with every rollout scored. A rollout whose verifier raised, or gave None or NaN or Inf, has reward
    None.

    prompts  those that the rollouts answer, found by prompt_index
    Raises TaskError if there are rollouts and none could be scored: that is a broken verifier, not a weak model.
    """
    by_index = {prompt.prompt_index: prompt for prompt in prompts}
    reasons: list[str] = []
    scored = [
        replace(group, rollouts=tuple(_scored(task, rollout, by_index, reasons) for rollout in group.rollouts))
        for group in groups
    ]
    num_rollouts = sum(len(group.rollouts) for group in groups)
    if num_rollouts and len(reasons) == num_rollouts:
        raise TaskError(f"none of {num_rollouts} rollouts could be scored; the first because: {reasons[0]}")
    return scored


def _scored(task: Task, rollout: Rollout, prompts: dict[int, Prompt], reasons: list[str]) -> Rollout:
    index = rollout.request.prompt_index
    if index not in prompts:
        raise TaskError(f"a rollout answers prompt {index}, which is not among the {len(prompts)} prompts of this step")
    try:
        reward = task.score(prompts[index], rollout.text)
        reason = "the verifier gave no score"
    except Exception as error:  # verifiers are foreign code; a fault is counted, and one everywhere fails the run
        reward, reason = None, f"{type(error).__name__}: {error}"
    if reward is not None and not math.isfinite(reward):
        reward, reason = None, f"the verifier gave {reward}"
    if reward is None:
        reasons.append(f"{reason} (prompt {index}, sample {rollout.request.sample})")
    return replace(rollout, reward=reward, scored=True)
