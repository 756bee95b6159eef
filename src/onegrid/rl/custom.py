"""Reward functions of users, by import path, in the two signatures that people have.

Free of torch, so that a scoring process starts fast.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from onegrid.errors import ConfigError
from onegrid.rl.rewards import Verdict, said


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One completion with all that a reward may want to know. Plain data, so that it travels to another process."""

    completion: str
    prompt: str | list[dict[str, str]]
    """As the data has it: text or a chat."""
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data set, without its prompt."""


def compute_scores(function: Callable[..., Any], items: Sequence[Item], **settings: Any) -> list[Verdict]:
    """Verdicts by verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, one call a completion.

    A number or bool is the reward, of a dictionary its "score"; a coroutine is waited for. What it raises, NaN, Inf and
    None are unscorable.
    """
    verdicts = []
    for item in items:
        try:
            score = _called(
                function,
                data_source=item.data_source,
                solution_str=item.completion,
                ground_truth=item.ground_truth,
                extra_info=dict(item.extra_info),
                **settings,
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code, whose time limits are often no Exception; a fault is counted,
            # and one everywhere fails the run
            verdicts.append(Verdict(reward=None, reason=said(error)))
            continue
        verdicts.append(_verdict(score.get("score") if isinstance(score, Mapping) else score, "compute_score"))
    return verdicts


def trl_scores(function: Callable[..., Any], items: Sequence[Item], **settings: Any) -> list[Verdict]:
    """Verdicts by TRL's `f(prompts, completions, **columns)`, one call for all items.

    Completions of chats are given as `[{"role": "assistant", "content": ...}]`, those of texts as text. The columns are
    lists: those of the data set, and data_source, ground_truth, extra_info. A function without **kwargs gets the
    arguments that it names; completion ids and the trainer's state are not among them. A coroutine is waited for. None
    says that the reward does not apply (reward None without a reason).
    """
    columns: dict[str, Any] = {name: [item.columns.get(name) for item in items] for name in _names(items)}
    columns |= {
        "prompts": [item.prompt for item in items],
        "completions": [
            item.completion if isinstance(item.prompt, str) else [{"role": "assistant", "content": item.completion}]
            for item in items
        ],
        "data_source": [item.data_source for item in items],
        "ground_truth": [item.ground_truth for item in items],
        "extra_info": [dict(item.extra_info) for item in items],
    }
    try:
        scores = list(_called(function, **_accepted(function, columns), **settings))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code, as above
        return [Verdict(reward=None, reason=said(error))] * len(items)
    if len(scores) != len(items):
        return [Verdict(reward=None, reason=f"{len(scores)} rewards for {len(items)} completions")] * len(items)
    return [Verdict(reward=None) if score is None else _verdict(score, "the function") for score in scores]


STYLES = {"compute_score": compute_scores, "trl": trl_scores}


@cache
def load_function(path: str) -> Callable[..., Any]:
    """The function named "package.module:function" or "folder/file.py:function". ConfigError if there is none."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ConfigError(f'the reward function {path!r} is not "package.module:function" or "folder/file.py:function"')
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"onegrid_reward_{Path(place).stem}", place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # whatever a module can raise while it is loaded
        raise ConfigError(f"cannot import the reward function {path!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise ConfigError(f"{place} has no function {name!r}; it has {', '.join(sorted(known)) or 'none'}")
    return function


def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """What a function gives, or what a coroutine function gives in the end."""
    found = function(**arguments)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def _verdict(score: Any, who: str) -> Verdict:
    try:
        value = float(score)
    except Exception as error:  # whatever an object of foreign code raises; OverflowError of 10**400
        return Verdict(
            reward=None, reason=f"{who} gave {_shown(score)}, which is not a number ({type(error).__name__})"
        )
    if not math.isfinite(value):
        return Verdict(reward=None, reason=f"{who} gave {value}")
    return Verdict(reward=value)


def _shown(score: Any) -> str:
    if score is None or isinstance(score, str):
        return repr(score if score is None else score[:40])
    return f"an object of type {type(score).__name__}"  # its own repr may raise, or be long


def _names(items: Sequence[Item]) -> list[str]:
    return list(dict.fromkeys(name for item in items for name in item.columns))


def _accepted(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    return {p.name: columns[p.name] for p in parameters if p.name in columns}
