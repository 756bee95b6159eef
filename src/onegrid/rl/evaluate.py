"""Held-out problems: greedy once, sampled several times, every share with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onegrid.errors import ConfigError
from onegrid.mismatch.statistics import Interval, mean_with_interval
from onegrid.rl.pass_at_k import mean_pass_at_k, wilson
from onegrid.rl.scored import scored_groups
from onegrid.rl.tasks import Prompt, Task
from onegrid.sampler.base import Sampler
from onegrid.types import Group, Rollout, Sampling

ANSWERS_AT_ONCE = 8192
"""Answers that are held in memory at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Accuracy on held-out problems, before and after training: greedy, and pass@k of sampled answers."""

    num_problems: int = 256
    """0: no evaluation."""
    every: int = 0
    """Also after every so many steps; 0: only before and after."""
    samples: int = 0
    """Sampled answers to each problem, beside the greedy one, for mean reward and pass@k. As many as there is time for:
    at most 8,192 answers are held at once."""
    ks: tuple[int, ...] = ()
    """The k of pass@k, each at most `samples`; empty takes 1 and `samples`."""
    threshold: float = 1.0
    """Reward from which an answer is right; to be set where rewards of users or several with weights do not give 1."""

    def __post_init__(self) -> None:
        if self.num_problems < 0 or self.every < 0:
            raise ConfigError(f"num_problems {self.num_problems} and every {self.every} must be at least 0")
        if not math.isfinite(self.threshold):
            raise ConfigError(f"threshold is {self.threshold}; it must be a finite reward")
        if self.samples < 0 or not all(1 <= k <= self.samples for k in self.ks):
            raise ConfigError(
                f"ks {list(self.ks)} of pass@k must lie in 1 .. samples, which is {self.samples} (at least 0)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """What was found on one set of problems."""

    num_problems: int
    greedy: Interval
    """Share of problems whose most likely answer is right; problems that could not be scored are left out."""
    sampled: Interval | None
    """Mean reward of sampled answers, bootstrap over problems; None without samples."""
    pass_at: dict[int, Interval]
    """By k."""
    unscorable: int
    """Answers, greedy and sampled."""
    truncated_share: float
    """Of all answers."""
    response_length: float
    """Mean tokens of all answers."""
    greedy_right: dict[int, bool | None]
    """By problem, None where it could not be scored; for comparing two checkpoints problem by problem."""

    def metrics(self, name: str = "held_out") -> dict[str, float]:
        """As flat `eval/<name>/...` entries."""
        found = {
            f"eval/{name}/problems": float(self.num_problems),
            f"eval/{name}/unscorable": float(self.unscorable),
            f"eval/{name}/truncated_share": self.truncated_share,
            f"eval/{name}/response_length": self.response_length,
        }
        shares = {"accuracy": self.greedy, "sampled": self.sampled}
        shares |= {f"pass_at_{k}": share for k, share in self.pass_at.items()}
        for key, share in shares.items():
            if share is not None:
                found |= {f"eval/{name}/{key}": share.estimate}
                found |= {f"eval/{name}/{key}_low": share.low, f"eval/{name}/{key}_high": share.high}
        return found


def evaluate(
    task: Task, sampler: Sampler, config: EvalConfig, *, sampling: Sampling, seed: int = 0
) -> dict[str, float]:
    """Answers to the first held-out problems, as `eval/held_out/...` metrics; none for 0 problems.

    `accuracy`, with its interval `accuracy_low` to `accuracy_high`, is that of the most likely answers to problems that
    could be scored; `unscorable` counts the others. `sampled` and `pass_at_<k>` are there with config.samples, drawn by
    the seed: the same in every evaluation of a run, so that two of them compare weights and not luck.
    """
    if not config.num_problems:
        return {}
    return judge(
        task,
        sampler,
        num_problems=config.num_problems,
        samples=config.samples,
        ks=config.ks or default_ks(config.samples),
        sampling=sampling,
        seed=seed,
        threshold=config.threshold,
    ).metrics()


def default_ks(samples: int) -> tuple[int, ...]:
    """The k of pass@k where none are asked for: one try, and all."""
    return tuple(sorted({1, samples})) if samples else ()


def judge(
    task: Task,
    sampler: Sampler,
    *,
    num_problems: int,
    samples: int,
    ks: Sequence[int],
    sampling: Sampling,
    seed: int,
    threshold: float = 1.0,
) -> Evaluated:
    """Greedy answers, and `samples` sampled ones, to the first held-out problems.

    ks         of pass@k, each at most `samples`; a problem with unscorable tries counts those that were scored
    sampling   that of training; the greedy pass replaces temperature, top-p and top-k
    threshold  reward from which an answer is right
    Answers are counted and forgotten, ANSWERS_AT_ONCE at a time. Raises ConfigError for no problem, or a k that no
    problem can have.
    """
    wrong = [k for k in ks if not 1 <= k <= samples]
    if wrong:
        raise ConfigError(f"pass@k was asked for k = {wrong}, with {samples} samples a problem; 1 <= k <= samples")
    if num_problems < 1:
        raise ConfigError("0 held-out problems were asked for; set eval.num_problems, or give --problems")
    prompts = task.held_out(num_problems)
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, record_routing=False)
    answers, right = _Answers(), {}
    for group in _groups(task, sampler, prompts, 1, sampling=greedy, seed=seed):
        answers.add(group)
        right[group.group_id] = _right(group.rollouts[0], threshold)
    scored = [value for value in right.values() if value is not None]
    tries: dict[int, _Tries] = {}
    for group in _groups(task, sampler, prompts, samples, sampling=sampling, seed=seed):
        answers.add(group)
        tries.setdefault(group.group_id, _Tries()).add(group, threshold)
    counted = [problem for problem in tries.values() if problem.num]
    means = [problem.total / problem.num for problem in counted]
    shares = {k: mean_pass_at_k([(problem.num, problem.num_right) for problem in counted], k, seed=seed) for k in ks}
    return Evaluated(
        num_problems=len(prompts),
        greedy=wilson(sum(scored), len(scored)),
        sampled=mean_with_interval(means, seed=seed) if means else None,
        pass_at={k: share for k, share in shares.items() if share is not None},
        unscorable=answers.unscorable,
        truncated_share=answers.truncated / answers.num,
        response_length=answers.num_tokens / answers.num,
        greedy_right=right,
    )


@dataclass(slots=True)
class _Answers:
    """What stays of answers of all kinds."""

    num: int = 0
    unscorable: int = 0
    truncated: int = 0
    num_tokens: int = 0

    def add(self, group: Group) -> None:
        for rollout in group.rollouts:
            self.num += 1
            self.unscorable += rollout.reward is None
            self.truncated += rollout.finish == "length"
            self.num_tokens += rollout.tokens_R.numel()


@dataclass(slots=True)
class _Tries:
    """What stays of the sampled answers to one problem that could be scored."""

    num: int = 0
    num_right: int = 0
    total: float = 0.0

    def add(self, group: Group, threshold: float) -> None:
        for rollout in group.rollouts:
            if rollout.reward is not None:
                self.num += 1
                self.num_right += rollout.reward >= threshold
                self.total += rollout.reward


def compare_greedy(before: Evaluated, after: Evaluated, *, seed: int = 0) -> Interval:
    """After minus before, paired by problem, with a bootstrap interval; problems scored in both only.

    Raises EmptyBatchError if there is none.
    """
    both = [
        float(after.greedy_right[i] or 0) - float(value)
        for i, value in before.greedy_right.items()
        if value is not None and after.greedy_right.get(i) is not None
    ]
    return mean_with_interval(both, seed=seed)


def _groups(
    task: Task, sampler: Sampler, prompts: Sequence[Prompt], samples: int, *, sampling: Sampling, seed: int
) -> Iterator[Group]:
    """`samples` answers to every prompt, in parts of equal size that hold all prompts where that is possible: so a part
    of which nothing can be scored is a broken verifier, and not a bad problem."""
    for rows in _even(len(prompts), ANSWERS_AT_ONCE):
        part = prompts[rows.start : rows.stop]
        for some in _even(samples, max(1, ANSWERS_AT_ONCE // len(part))):
            yield from scored_groups(
                task, sampler, part, len(some), sampling=sampling, seed=seed, first_sample=some.start
            )


def _even(total: int, most: int) -> list[range]:
    """0 .. total - 1 in ranges of at most `most`, as equal as they can be."""
    if not total:
        return []
    size = math.ceil(total / math.ceil(total / most))
    return [range(at, min(at + size, total)) for at in range(0, total, size)]


def _right(rollout: Rollout, threshold: float) -> bool | None:
    return None if rollout.reward is None else rollout.reward >= threshold
