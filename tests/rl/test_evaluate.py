"""Evaluation: what is counted, in parts of bounded memory, and what stands where nothing is asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from onegrid.errors import ConfigError
from onegrid.rl import evaluate as evaluation
from onegrid.rl.evaluate import EvalConfig, evaluate, judge
from onegrid.rl.tasks import Prompt
from onegrid.types import Sampling
from tests.rl.rollouts import rollout

SAMPLING = Sampling(max_new_tokens=8)


class Sampler:
    """Answers that depend on prompt and sample alone, as those of an engine do; keeps how many were asked for."""

    def __init__(self):
        self.asked, self.sampling = [], []

    def generate(self, requests, finished=None):
        self.asked.append(len(requests))
        self.sampling += [r.sampling for r in requests]
        return [
            replace(rollout(r.prompt_index, r.sample, text=str((r.prompt_index * 7 + r.sample * 3) % 5)), request=r)
            for r in requests
        ]


class Task:
    """The answer 0 is right, 1 nearly, and 2 to the first problem cannot be scored."""

    def held_out(self, n):
        return [Prompt(prompt_index=i, text="q", tokens=(1, 5), answer="0", data_source="made") for i in range(n)]

    def score(self, prompt, text):
        if prompt.prompt_index == 0 and text == "2":
            return None
        return {"0": 1.0, "1": 0.5}.get(text, 0.0)


def judged(sampler, **settings):
    given = {"num_problems": 6, "samples": 9, "ks": (1, 3), "sampling": SAMPLING, "seed": 0} | settings
    return judge(Task(), sampler, **given)


@pytest.mark.parametrize("at_once", [4, 6, 7, 20])
def test_answers_in_parts_are_the_answers_and_no_more_are_held(monkeypatch, at_once):
    whole = judged(Sampler())
    monkeypatch.setattr(evaluation, "ANSWERS_AT_ONCE", at_once)
    sampler = Sampler()
    assert judged(sampler) == whole
    assert max(sampler.asked) <= at_once and sum(sampler.asked) == 6 + 6 * 9


def test_the_numbers_are_those_of_all_answers():
    found = judged(Sampler())
    texts = [[(i * 7 + s * 3) % 5 for s in range(9)] for i in range(6)]
    assert found.greedy.estimate == pytest.approx(sum(t[0] == 0 for t in texts) / 6)
    assert found.unscorable == sum(t == 2 for t in texts[0])
    rewards = [[{0: 1.0, 1: 0.5}.get(t, 0.0) for t in row if (i, t) != (0, 2)] for i, row in enumerate(texts)]
    assert found.sampled.estimate == pytest.approx(sum(sum(r) / len(r) for r in rewards) / 6)
    ways = [(len(r), sum(x == 1.0 for x in r)) for r in rewards]
    third = [1 - math.comb(n - c, 3) / math.comb(n, 3) for n, c in ways]
    assert found.pass_at[3].estimate == pytest.approx(sum(third) / 6)
    assert judged(Sampler(), threshold=0.5).pass_at[1].estimate > found.pass_at[1].estimate


def test_the_first_answer_is_the_most_likely_one_and_the_others_are_drawn_as_in_training():
    sampler, drawn = Sampler(), Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=8)
    judged(sampler, num_problems=2, samples=3, sampling=drawn)
    assert sampler.sampling == [Sampling(temperature=0.0, max_new_tokens=8)] * 2 + [drawn] * 6


def test_without_problems_nothing_is_evaluated_and_asking_for_it_says_so():
    sampler = Sampler()
    assert evaluate(Task(), sampler, EvalConfig(num_problems=0), sampling=SAMPLING) == {} and not sampler.asked
    with pytest.raises(ConfigError, match=r"eval\.num_problems"):
        judged(sampler, num_problems=0)
    with pytest.raises(ConfigError, match="num_problems -1"):
        EvalConfig(num_problems=-1)
    with pytest.raises(ConfigError, match="threshold is nan"):
        EvalConfig(threshold=float("nan"))
