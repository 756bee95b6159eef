"""Several rewards in other processes: time limits that hold, faults that are counted."""

from __future__ import annotations

import textwrap
import time

import pytest

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.batch import group_rollouts
from onegrid.rl.custom import Item
from onegrid.rl.rewards import score_rollouts
from onegrid.rl.scoring import RewardConfig, Scoring, ScoringConfig
from onegrid.rl.tasks import Prompt
from tests.rl.rollouts import rollout

REWARDS = """
import asyncio, os, time

def exact(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        os._exit(9)
    if solution_str == "raise":
        raise ValueError("no")
    return {"score": float(solution_str == ground_truth) * extra_info.get("scale", 1)}

def length(completions, limit, **columns):
    return [None if c == "skip" else float(len(c) <= limit[0]) for c in completions]

def chat(prompts, completions, answer):
    assert all(p[0]["role"] == "user" for p in prompts)
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]

class Limit(BaseException):
    def __str__(self):
        raise ValueError("its own message")

def out_of_time(data_source, solution_str, ground_truth, extra_info):
    raise Limit

def wordy(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("x" * 10**6)

async def later(completions):
    return [1.0]

async def much_later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    return 1.0

def few(completions):
    return [1.0]

def nan(completions):
    return [float("nan") for _ in completions]
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(textwrap.dedent(REWARDS))
    return str(file)


def item(completion, truth="right", **fields):
    return Item(**({"completion": completion, "prompt": "q", "data_source": "made", "ground_truth": truth} | fields))


def rewards_of(scoring, items):
    return [v.reward for v in scoring.score(items)]


def test_case_V1_a_hung_verifier_costs_its_time_limit_and_no_more(path):
    config = ScoringConfig(rewards=(RewardConfig(function=f"{path}:exact"),), workers=1, time_limit=1.0)
    scoring = Scoring(config)
    try:
        assert rewards_of(scoring, [item("right")]) == [1.0]
        began = time.monotonic()
        verdicts = scoring.score([item(t) for t in ("hang", "right", "die", "raise", "wrong")])
        assert time.monotonic() - began < 300, "of the 600 s that it would have slept"
    finally:
        scoring.close()
    assert [v.reward for v in verdicts] == [None, 1.0, None, None, 0.0]
    assert "1 s" in verdicts[0].reason and "ValueError: no" in verdicts[3].reason and verdicts[2].reason


def test_case_V1_expressions_are_compared_in_another_process():
    scoring = Scoring(ScoringConfig(workers=1))
    try:
        items = [item(rf"\boxed{{{a}}}", "x+1") for a in ("1+x", "x+2", "x+1", "")]
        pending = scoring.submit(items)  # returns at once; the caller may go on
        assert [v.reward for v in pending.verdicts()] == [1.0, 0.0, 1.0, 0.0]
    finally:
        scoring.close()


def test_numbers_need_no_process():
    scoring = Scoring(ScoringConfig())
    assert rewards_of(scoring, [item(r"\boxed{5}", "5"), item("#### 6", 5)]) == [1.0, 0.0]
    assert scoring._pool is None


def test_rewards_add_up_by_weight_and_a_fault_in_one_is_a_fault(path):
    rewards = (
        RewardConfig(function=f"{path}:exact", weight=2.0),
        RewardConfig(function=f"{path}:length", style="trl", weight=0.5),
    )
    scoring = Scoring(ScoringConfig(rewards=rewards, workers=0))
    columns = {"limit": 5}
    found = rewards_of(scoring, [item(t, columns=columns) for t in ("right", "longer than five", "skip", "raise")])
    assert found == [2.5, 0.0, 0.0, None]
    assert rewards_of(scoring, [item("right", columns=columns, extra_info={"scale": 3})]) == [6.5]


def test_each_of_several_rewards_is_kept_by_name_and_one_of_weight_0_only_watches(path):
    rewards = (
        RewardConfig(function=f"{path}:length", style="trl", weight=-0.5, name="brief"),
        RewardConfig(function=f"{path}:exact", weight=0.0),
    )
    scoring = Scoring(ScoringConfig(rewards=rewards, workers=0))
    verdicts = scoring.score([item(t, columns={"limit": 5}) for t in ("right", "longer than five", "raise", "skip")])
    assert [v.reward for v in verdicts] == [-0.5, 0.0, -0.5, None]
    assert [v.parts for v in verdicts] == [
        {"brief": 1.0, "exact": 1.0},
        {"brief": 0.0, "exact": 0.0},
        {"brief": 1.0},
        {"exact": 0.0},
    ]
    assert verdicts[3].reason == "no reward applies to this completion"


def test_rewards_of_one_name_or_of_an_odd_one_are_refused():
    with pytest.raises(ConfigError, match="called math, math; give each another name"):
        ScoringConfig(rewards=(RewardConfig(), RewardConfig(answer_type="integer")))
    with pytest.raises(ConfigError, match="letters, digits"):
        RewardConfig(name="a/b")


def test_the_signature_of_TRL_gets_chats_and_columns(path):
    scoring = Scoring(ScoringConfig(rewards=(RewardConfig(function=f"{path}:chat", style="trl"),), workers=0))
    prompt = [{"role": "user", "content": "1+1"}]
    items = [item(c, prompt=prompt, columns={"answer": "2", "other": 1}) for c in ("2", "3")]
    assert rewards_of(scoring, items) == [1.0, 0.0]


def test_importing_a_reward_costs_none_of_its_time_limit(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\ntime.sleep(1.5)  # as loading a large library does\n\ndef f(completions):\n    return [1.0]\n"
    )
    rewards = (RewardConfig(function=f"{file}:f", style="trl"),)
    scoring = Scoring(ScoringConfig(rewards=rewards, workers=1, time_limit=1.0))
    try:
        assert rewards_of(scoring, [item("right")]) == [1.0]
    finally:
        scoring.close()


@pytest.mark.parametrize("name", ["few", "nan"])
def test_case_V7_rewards_of_the_wrong_number_or_NaN_are_unscorable(path, name):
    scoring = Scoring(ScoringConfig(rewards=(RewardConfig(function=f"{path}:{name}", style="trl"),), workers=0))
    verdicts = scoring.score([item("a"), item("b")])
    assert [v.reward for v in verdicts] == [None, None] and all(v.reason for v in verdicts)


def test_no_reward_that_applies_is_unscorable(path):
    scoring = Scoring(ScoringConfig(rewards=(RewardConfig(function=f"{path}:length", style="trl"),), workers=0))
    assert scoring.score([item("skip", columns={"limit": 1})])[0].reward is None


@pytest.mark.parametrize(("name", "kind"), [("out_of_time", "Limit"), ("wordy", "ValueError: xxx")])
def test_case_V7_an_error_of_any_kind_is_a_short_reason(path, name, kind):
    (verdict,) = Scoring(ScoringConfig(rewards=(RewardConfig(function=f"{path}:{name}"),), workers=0)).score(
        [item("a")]
    )
    assert verdict.reward is None and verdict.reason.startswith(kind) and len(verdict.reason) <= 200


@pytest.mark.parametrize(("name", "style"), [("later", "trl"), ("much_later", "compute_score")])
def test_a_coroutine_is_waited_for(path, name, style):
    rewards = (RewardConfig(function=f"{path}:{name}", style=style),)
    assert rewards_of(Scoring(ScoringConfig(rewards=rewards, workers=0)), [item("a")]) == [1.0]


def test_weights_that_are_all_0_are_refused_before_a_run_begins(path):
    with pytest.raises(ConfigError, match="weight 0"):
        ScoringConfig(rewards=(RewardConfig(weight=0.0), RewardConfig(function=f"{path}:exact", weight=0.0)))


@pytest.mark.parametrize("function", ["nowhere.at.all:f", "no_colon", "tests.rl.rollouts:missing"])
def test_a_function_that_cannot_be_imported_fails_at_once(function):
    with pytest.raises(ConfigError, match=function.partition(":")[0]):
        Scoring(ScoringConfig(rewards=(RewardConfig(function=function),)))


def test_case_V7_a_reward_that_always_fails_ends_the_run(path):
    class Task:
        scoring = Scoring(ScoringConfig(rewards=(RewardConfig(function=f"{path}:exact"),), workers=0))

        def score(self, prompt, text):
            raise AssertionError("submit is preferred")

        def submit(self, answered):
            return self.scoring.submit([item(text) for _, text in answered])

    prompt = Prompt(prompt_index=0, text="q", tokens=(1,), answer="right", data_source="made")

    def run(*texts):
        return score_rollouts(
            Task(), group_rollouts([rollout(0, i, text=t) for i, t in enumerate(texts)]), prompts=[prompt]
        )

    assert [r.reward for r in run("raise", "right")[0].rollouts] == [None, 1.0]
    with pytest.raises(TaskError, match="none of 2 rollouts could be scored; the first because: ValueError: no"):
        run("raise", "raise")
