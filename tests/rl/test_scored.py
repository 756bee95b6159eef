"""Scoring goes on while others still generate, and nothing depends on who ends first."""

from __future__ import annotations

import random

import pytest

from onegrid.rl.batch import group_rollouts, make_requests
from onegrid.rl.rewards import Scorer
from onegrid.rl.rewards import Verdict as Reward
from onegrid.rl.scored import scored_groups
from onegrid.rl.tasks import Prompt
from onegrid.types import Sampling
from tests.rl.rollouts import rollout
from tests.sampler.tiny import engine_of, requests_of

PROMPTS = [Prompt(prompt_index=i, text="q", tokens=(1, 5), answer="", data_source="made") for i in range(5)]


class Judge:
    """Scores elsewhere, and notes what it was given and when."""

    def __init__(self):
        self.events = []

    def submit(self, answered):
        self.events.append(("submitted", answered[0][0].prompt_index, [text for _, text in answered]))
        rewards = [Reward(reward=float(text[-1])) for _, text in answered]

        class Pending:
            def verdicts(self):
                return rewards

        return Pending()


class Shuffled:
    """A sampler whose completions end in an order of its own."""

    def __init__(self, seed, events):
        self.random, self.events = random.Random(seed), events

    def generate(self, requests, on_finished=None):
        rollouts = [rollout(r.prompt_index, r.sample, text=f"{r.prompt_index}:{r.sample}") for r in requests]
        for ended in self.random.sample(rollouts, len(rollouts)):
            self.events.append(("ended", ended.request.prompt_index, ended.request.sample))
            on_finished(ended)
        return rollouts


@pytest.mark.parametrize("seed", range(5))
def test_groups_do_not_depend_on_who_ends_first(seed):
    judge = Judge()
    groups = scored_groups(judge, Shuffled(seed, judge.events), PROMPTS, 3, sampling=Sampling(), seed=0)
    assert [g.group_id for g in groups] == [0, 1, 2, 3, 4]
    assert [[r.reward for r in g.rollouts] for g in groups] == [[0.0, 1.0, 2.0]] * 5
    submitted = {event[1]: event[2] for event in judge.events if event[0] == "submitted"}
    assert submitted == {i: [f"{i}:{s}" for s in range(3)] for i in range(5)}


def test_a_group_is_scored_when_its_last_completion_ends():
    judge = Judge()
    scored_groups(judge, Shuffled(0, judge.events), PROMPTS, 3, sampling=Sampling(), seed=0)
    for place, event in enumerate(judge.events):
        if event[0] == "submitted":
            before = [e for e in judge.events[:place] if e[:2] == ("ended", event[1])]
            assert len(before) == 3 and before[-1] == judge.events[place - 1]
    assert [e[0] for e in judge.events[:-2]].count("submitted") == 4, "all but the last, while others generate"


def test_groups_that_a_sampler_never_told_of_are_scored_too():
    judge = Judge()
    scorer = Scorer(judge, PROMPTS, group_size=2)
    rollouts = [rollout(i, s, text=str(s)) for i in range(3) for s in range(2)]
    for ended in rollouts[:3]:
        scorer.finished(ended)
    groups = scorer.scored(group_rollouts(rollouts))
    assert [[r.reward for r in g.rollouts] for g in groups] == [[0.0, 1.0]] * 3
    assert [event[1] for event in judge.events] == [0, 1, 2]


def test_the_engine_tells_of_every_rollout_once_and_as_it_ends():
    engine = engine_of("dense", "mxfp8", max_slots=3)
    requests, told = requests_of(9), []
    rollouts = engine.generate(requests, told.append)
    assert len(told) == 9 and {id(r) for r in told} == {id(r) for r in rollouts}
    assert [r.request for r in rollouts] == list(requests)

    def refuse(ended):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(requests, refuse)
    again = engine.generate(requests)
    assert [r.tokens_R.tolist() for r in again] == [r.tokens_R.tolist() for r in rollouts]


def test_requests_of_a_group_stand_together():
    requests = make_requests(PROMPTS, 3, seed=0, sampling=Sampling())
    assert [(r.prompt_index, r.sample) for r in requests[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]
