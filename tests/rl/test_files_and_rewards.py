"""A run on somebody's files with somebody's reward, from the command's own function to its record."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from onegrid.cli.train import run
from onegrid.errors import TaskError
from onegrid.rl.custom import Item
from onegrid.rl.record import read_metrics
from onegrid.rl.scoring import RewardConfig, Scoring, ScoringConfig
from tests.rl.data_files import gsm8k_rows, write_jsonl
from tests.rl.tiny import write_tiny_run

REWARDS = """
import sys

class Odd:
    def __float__(self):
        raise KeyError("odd")
    def __repr__(self):
        raise KeyError("odd too")

ANSWERS = {
    "huge": 10**400, "odd": Odd(), "list": [1.0], "text": "good", "long": "x" * 10**6, "number": "0.5", "inf": 1e999
}

def answers(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit":
        sys.exit(3)
    return ANSWERS[solution_str]

def trl(completions):
    return [ANSWERS[c] for c in completions]

def leaves(completions):
    sys.exit(3)

def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

def even(data_source, solution_str, ground_truth, extra_info):
    return extra_info["index"] % 2 == 0
"""


def train(folder, rows, *overrides):
    name = write_jsonl(folder / "mine.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS)
    settings = ["task.name=dataset", "task.digits=2", f'task.data.files=["{name}"]', 'task.data.chat="plain"']
    rewards = ["task.scoring.workers=0", f'task.scoring.rewards=[{{function="{folder / "rewards.py"}:length"}}]']
    run(
        write_tiny_run(folder),
        [*settings, *rewards, "eval.num_problems=2", *overrides],
        run_dir=folder / "run",
        num_steps=1,
        resume=False,
        dry_run=False,
    )


def test_a_run_on_files_begins_at_its_first_step_and_is_scored_by_their_reward(tmp_path):
    train(tmp_path, gsm8k_rows(30))
    start, step = read_metrics(tmp_path / "run")
    assert start["eval/held_out/problems"] == 2 and step["step"] == 1
    assert 0 <= step["rollout/raw_reward"] <= 3 and step["rollout/unscorable"] == 0


def test_a_kept_rollout_can_be_scored_again_and_each_reward_is_in_the_record(tmp_path):
    file = tmp_path / "rewards.py"
    two = f'task.scoring.rewards=[{{function="{file}:length"}}, {{function="{file}:even", weight=0.5}}]'
    rows = [row | {"extra_info": {"index": i, "note": "\ud800"}} for i, row in enumerate(gsm8k_rows(30))]
    train(tmp_path, rows, two, 'task.data.metadata_key="extra_info"')
    names = {}
    exec(file.read_text(), names)
    kept = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(kept) == 16
    for row in kept:
        truth, extra_info = json.loads(row["ground_truth"]), json.loads(row["extra_info"])
        assert truth.startswith(row["prompt"].partition("+")[0]) and row["data_source"] == "mine"
        given = {"data_source": row["data_source"], "ground_truth": truth, "extra_info": extra_info}
        again = {name: float(names[name](solution_str=row["response"], **given)) for name in ("length", "even")}
        assert dict(row["rewards"]) == again and row["reward"] == again["length"] + 0.5 * again["even"]
        assert rows[extra_info["index"]]["question"] == row["prompt"] and extra_info["note"] == "\ud800"
    line = read_metrics(tmp_path / "run")[1]
    assert line["rollout/reward/even"] == sum(dict(row["rewards"])["even"] for row in kept) / 16


def test_files_that_leave_too_few_problems_end_a_run_before_it_leaves_anything(tmp_path):
    with pytest.raises(TaskError, match="99 held-out problems were asked for"):
        train(tmp_path, gsm8k_rows(30), "eval.num_problems=99")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("style", ["compute_score", "trl"])
def test_whatever_a_reward_gives_is_a_number_or_unscorable_with_a_short_reason(tmp_path, style):
    (tmp_path / "rewards.py").write_text(REWARDS)
    name = "answers" if style == "compute_score" else "trl"
    reward = RewardConfig(function=f"{tmp_path / 'rewards.py'}:{name}", style=style)
    texts = ["huge", "odd", "list", "text", "long", "inf", "number"]
    items = [Item(completion=t, prompt="q", data_source="made", ground_truth="x") for t in texts]
    verdicts = Scoring(ScoringConfig(rewards=(reward,), workers=0)).score(items)
    assert [v.reward for v in verdicts] == [None] * 6 + [0.5]
    assert all(0 < len(v.reason) < 200 for v in verdicts[:-1])


@pytest.mark.parametrize(("name", "style"), [("answers", "compute_score"), ("leaves", "trl")])
def test_a_reward_that_ends_its_process_does_not_end_the_run_with_it(tmp_path, name, style):
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = RewardConfig(function=f"{tmp_path / 'rewards.py'}:{name}", style=style)
    item = Item(completion="exit", prompt="q", data_source="made", ground_truth="x")
    (verdict,) = Scoring(ScoringConfig(rewards=(reward,), workers=0)).score([item])
    assert verdict.reward is None and "SystemExit" in verdict.reason
