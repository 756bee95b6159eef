"""Several rewards with weights, computed by a pool of processes while the sampler goes on.

A verifier is code that nobody controls: it may hang, crash or eat memory. So it runs in a process that is ended when
its time is up and replaced, and costs its time limit and no more. Free of torch, because every worker imports it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.custom import STYLES, Item, load_function
from onegrid.rl.rewards import Verdict, said
from onegrid.rl.verify import ANSWER_TYPES, Expressions, compare_numbers, same_expression, warm_up


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """One reward of several."""

    function: str = "math"
    """"math", or the import path of a function: "package.module:name" or "folder/file.py:name"."""
    style: Literal["compute_score", "trl"] = "compute_score"
    """Signature of a function: verl's compute_score(data_source, solution_str, ground_truth, extra_info) or TRL's
    f(completions, **columns)."""
    weight: float = 1.0
    """0 only watches: then its mean is among the metrics, and where it fails or does not apply nothing happens."""
    name: str = ""
    """In `rollout/reward/<name>`, where there are several; empty takes the function's."""
    answer_type: Literal["auto", "integer", "decimal", "fraction", "expression"] = "auto"
    """math: what an answer has to be; see `onegrid.rl.verify.verify_math`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of the function."""

    def __post_init__(self) -> None:
        if self.answer_type not in ANSWER_TYPES or self.style not in STYLES:
            raise ConfigError(f"answer_type {self.answer_type!r} or style {self.style!r} is not known")
        if not abs(self.weight) < float("inf"):
            raise ConfigError(f"the weight of the reward {self.function!r} is {self.weight}; it must be finite")
        if not re.fullmatch(r"[\w.-]*", self.name):
            raise ConfigError(f"the name of the reward {self.function!r} is {self.name!r}; letters, digits, . - _ only")
        if self.function == "math" and self.settings:
            raise ConfigError(f'the reward "math" has no settings, got {self.settings}; it has answer_type')


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringConfig:
    """How completions are scored."""

    rewards: tuple[RewardConfig, ...] = ()
    """Added up by weight; empty for mathematics alone."""
    workers: int = 2
    """Processes; 0 scores in the calling thread, without a time limit, for debugging."""
    time_limit: float = 10.0
    """Seconds for one call of one reward. What a process takes to start and to import it does not count."""

    def __post_init__(self) -> None:
        if self.workers < 0 or not 0.0 < self.time_limit < float("inf"):
            raise ConfigError(
                f"scoring has {self.workers} workers (at least 0) and a time limit of {self.time_limit} s (above 0)"
            )
        names = reward_names(self.rewards)
        if len(set(names)) < len(names):
            raise ConfigError(f"rewards are called {', '.join(names)}; give each another name")
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise ConfigError(
                "all rewards have the weight 0, so that nothing could be learned; give one another weight"
            )


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """What each is called in the metrics."""
    return [reward.name or reward.function.rpartition(":")[2] for reward in rewards]


class Pending:
    """Scores that are being computed."""

    def __init__(
        self, rewards: Sequence[RewardConfig], futures: Sequence[Sequence[Future[list[Verdict]]]], limit: float
    ):
        self._weights, self._names = [reward.weight for reward in rewards], reward_names(rewards)
        self._futures, self._limit = futures, limit

    def verdicts(self) -> list[Verdict]:
        """One per item, in order; waits until all are there.

        The weighted sum of the rewards that apply. A completion is unscorable, with a reason, if any of its rewards
        that have a weight failed, ran out of time or lost its process, or if none applies.
        """
        columns = [[v for future in row for v in self._result(future)] for row in self._futures]
        return [_total(self._weights, self._names, column) for column in zip(*columns, strict=True)]

    def _result(self, future: Future[list[Verdict]]) -> list[Verdict]:
        try:
            return future.result()
        except OutOfTime:
            reason = f"took longer than {self._limit:g} s; its process was ended"
        except TaskError:
            raise
        except Exception as error:  # a process that died, or an answer that could not be sent
            reason = said(error)
        return [Verdict(reward=None, reason=reason)] * getattr(future, "num_items", 1)


class Scoring:
    """The rewards of a run. Workers start with the first completion that needs one, and end with `close`.

    Raises ConfigError for a function that cannot be imported, at once and not at the first completion.
    """

    def __init__(self, config: ScoringConfig) -> None:
        self.config = config
        self.rewards = config.rewards or (RewardConfig(),)
        self._pool: Any = None
        for reward in self.rewards:
            if reward.function != "math":
                load_function(reward.function)

    def submit(self, items: Sequence[Item]) -> Pending:
        """Begin to score completions of one prompt, and return at once. TRL's functions get them in one call."""
        rows = [self._futures(reward, list(items)) for reward in self.rewards]
        return Pending(self.rewards, rows, self.config.time_limit)

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """`submit` and wait."""
        return self.submit(items).verdicts()

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _futures(self, reward: RewardConfig, items: list[Item]) -> list[Future[list[Verdict]]]:
        if reward.function == "math":
            asked: dict[Expressions, Future[list[Verdict]]] = {}
            return [self._math(reward, item, asked) for item in items]
        if reward.style == "trl":
            return [self._call(_custom, reward, items)]
        return [self._call(_custom, reward, [item]) for item in items]

    def _math(
        self, reward: RewardConfig, item: Item, asked: dict[Expressions, Future[list[Verdict]]]
    ) -> Future[list[Verdict]]:
        found = compare_numbers(item.completion, item.ground_truth, answer_type=reward.answer_type)
        if isinstance(found, Verdict):
            return _done([found])
        if found not in asked:  # answers of one group are often the same
            asked[found] = self._call(_expression, found)
        return asked[found]

    def _call(self, function: Any, *args: Any) -> Future[list[Verdict]]:
        if self.config.workers == 0:
            return _done(function(*args))
        if self._pool is None:
            self._pool = _start(self.config.workers, [reward.function for reward in self.rewards])
        future = self._pool.schedule(function, args=args, timeout=self.config.time_limit)
        future.num_items = len(args[1]) if function is _custom else 1
        return future


def _start(workers: int, functions: Sequence[str]) -> Any:
    try:
        import pebble
    except ImportError as error:
        raise TaskError(
            f'scoring in processes needs pebble: pip install "onegrid[rewards]", or set workers = 0 ({error})'
        ) from error
    if "math" in functions and importlib.util.find_spec("math_verify") is None:
        raise TaskError(
            'comparing expressions needs math-verify, which is not installed: pip install "onegrid[rewards]", or set '
            "the answer type to integer, decimal or fraction"
        )
    # spawn: a fork of a process in which torch runs threads can hang
    context = multiprocessing.get_context("spawn")
    return pebble.ProcessPool(max_workers=workers, context=context, initializer=_begin, initargs=(functions,))


def _begin(functions: Sequence[str]) -> None:
    """A worker's first act, which no time limit counts: a module of rewards may load libraries for longer than that.

    Ctrl-C reaches it too, and must not cost the scores of the step at hand.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for function in functions:
        if function == "math":
            warm_up()
            continue
        with suppress(ConfigError):  # the call says so, for each completion
            load_function(function)


def _custom(reward: RewardConfig, items: list[Item]) -> list[Verdict]:
    return STYLES[reward.style](load_function(reward.function), items, **reward.settings)


def _expression(found: Expressions) -> list[Verdict]:
    try:
        return [same_expression(found)]
    except TaskError:
        raise
    except Exception as error:  # math-verify and sympy raise of many kinds on what models write
        return [Verdict(reward=None, reason=said(error))]


def _done(verdicts: list[Verdict]) -> Future[list[Verdict]]:
    future: Future[list[Verdict]] = Future()
    future.set_result(verdicts)
    return future


def _total(weights: Sequence[float], names: Sequence[str], verdicts: Sequence[Verdict]) -> Verdict:
    found = zip(names, verdicts, strict=True)
    parts = {name: v.reward for name, v in found if v.reward is not None} if len(names) > 1 else {}
    weighted = [(w, v) for w, v in zip(weights, verdicts, strict=True) if w]
    failed = [v.reason for _, v in weighted if v.reward is None and v.reason]
    if failed:
        return Verdict(reward=None, reason="; ".join(dict.fromkeys(failed)), parts=parts)
    applicable = [w * v.reward for w, v in weighted if v.reward is not None]
    if not applicable:
        return Verdict(reward=None, reason="no reward applies to this completion", parts=parts)
    return Verdict(reward=sum(applicable), parts=parts)
