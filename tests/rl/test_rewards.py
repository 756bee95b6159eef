"""Rewards: a strict verifier, and errors that are neither 0 nor 1."""

from __future__ import annotations

import pytest

from onegrid.errors import TaskError
from onegrid.rl.advantage import advantages_of
from onegrid.rl.batch import group_rollouts, pack
from onegrid.rl.rewards import at_threshold, score_rollouts, verify_integer
from onegrid.rl.summary import rollout_metrics
from onegrid.rl.tasks import Prompt
from tests.rl.rollouts import rollout

PROMPT = Prompt(prompt_index=0, text="1+1=", tokens=(1, 5), answer="2", data_source="made")


class Lookup:
    """A verifier that answers from a table; an exception in it is raised."""

    def __init__(self, **scores):
        self.scores = scores

    def score(self, prompt, text):
        score = self.scores[text]
        if isinstance(score, Exception):
            raise score
        return score


def groups_of(*texts):
    return group_rollouts([rollout(0, i, text=text, scored=False) for i, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("46", "46", 1.0),
        (" 46 ", "46", 1.0),
        ("-22", "-22", 1.0),
        ("0", "0", 1.0),
        ("46", 46, 1.0),
        ("64", "46", 0.0),
        ("046", "46", 0.0),
        ("+46", "46", 0.0),
        ("46.0", "46", 0.0),
        ("46 46", "46", 0.0),
        ("46\n", "46", 0.0),
        ("4 6", "46", 0.0),
        ("-0", "0", 0.0),
        ("", "46", 0.0),
        ("٤٦", "46", 0.0),
        ("nan", "46", 0.0),
        ("46", "forty-six", None),
        ("", "", None),
    ],
)
def test_an_integer_is_right_only_when_it_is_the_whole_completion(completion, answer, reward):
    assert verify_integer(completion, answer).reward == reward


def test_partial_credit_counts_from_the_threshold_on():
    assert [at_threshold(s, 0.5) for s in (0.0, 0.49, 0.5, 1.0)] == [0.0, 0.0, 1.0, 1.0]
    assert at_threshold(None, 0.5) is None
    assert at_threshold(float("nan"), 0.5) is None


def test_case_V7_one_raising_verifier_of_four_is_masked_and_counted():
    task = Lookup(broken=RuntimeError("parser"), right=1.0, also=1.0, wrong=0.0)
    groups = score_rollouts(task, groups_of("broken", "right", "also", "wrong"), prompts=[PROMPT])
    assert [r.reward for r in groups[0].rollouts] == [None, 1.0, 1.0, 0.0]
    assert all(r.scored for r in groups[0].rollouts)
    advantages = advantages_of(groups, "dr_grpo")
    assert advantages[0] is None and advantages[1:] == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    batch = pack(groups, advantages)
    assert [bool(s.mask_R.any()) for s in batch.sequences] == [False, True, True, True]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/unscorable"] == 1.0
    assert metrics["rollout/raw_reward"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("score", [RuntimeError("parser is gone"), None, float("nan")])
def test_case_V7_a_verifier_that_scores_nothing_fails_the_run(score):
    with pytest.raises(TaskError, match="none of 2 rollouts could be scored"):
        score_rollouts(Lookup(a=score), groups_of("a", "a"), prompts=[PROMPT])


def test_case_V7_the_failure_says_what_the_verifier_said():
    with pytest.raises(TaskError, match=r"RuntimeError: parser is gone .prompt 0, sample 0"):
        score_rollouts(Lookup(a=RuntimeError("parser is gone")), groups_of("a"), prompts=[PROMPT])


def test_an_interrupt_is_not_swallowed():
    class Interrupted:
        def score(self, prompt, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_rollouts(Interrupted(), groups_of("a"), prompts=[PROMPT])


def test_a_rollout_of_an_unknown_prompt_is_refused():
    with pytest.raises(TaskError, match="prompt 0"):
        score_rollouts(Lookup(a=1.0), groups_of("a"), prompts=[])


def test_no_rollouts_are_no_failure():
    assert score_rollouts(Lookup(), [], prompts=[]) == []
