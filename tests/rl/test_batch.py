"""Batches: the sampled ids and nothing else, masks by rule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from onegrid.errors import ConfigError, EmptyBatchError, MismatchError
from onegrid.rl.advantage import advantages_of
from onegrid.rl.batch import group_rollouts, make_requests, pack
from onegrid.rl.summary import is_informative, rollout_metrics
from onegrid.rl.tasks import Prompt
from onegrid.types import Group, Sampling
from tests.bytes import assert_same_bytes
from tests.rl.rollouts import group, rollout


def test_case_M12_the_ids_that_are_learned_are_the_ids_that_were_sampled():
    # A tokenizer that would write [he, llo] again as [hello] changes nothing: text is never read.
    sampled = replace(rollout(0, 0, text="hello", reward=1.0), tokens_R=torch.tensor([17, 23]))
    sequence = pack([Group(group_id=0, rollouts=(sampled,))], [0.5]).sequences[0]
    assert_same_bytes(sequence.tokens_T, torch.tensor([1, 5, 17, 23]))
    assert sequence.num_prompt == 2
    assert sequence.sampler_logp_R is sampled.logp_R
    assert sequence.version_R is sampled.version_R


def test_kept_sets_and_routing_travel_with_their_tokens():
    kept, routing = (torch.tensor([1]), torch.tensor([2, 3])), torch.zeros(2, 1, 2, dtype=torch.int16)
    sampled = replace(rollout(0, 0, reward=1.0), kept=kept, routing_RLE=routing)
    sequence = pack([Group(group_id=0, rollouts=(sampled,))], [0.5]).sequences[0]
    assert sequence.kept is kept and sequence.routing_RLE is routing


def test_every_rollout_becomes_one_sequence_with_its_own_advantage():
    groups = [group(3, 1.0, 0.0), group(8, 0.0, 1.0, length=4)]
    batch = pack(groups, advantages_of(groups, "dr_grpo"), temperature=0.7)
    assert batch.temperature == 0.7
    assert [s.group_id for s in batch.sequences] == [3, 3, 8, 8]
    assert [s.advantage_R.tolist() for s in batch.sequences] == [[0.5] * 2, [-0.5] * 2, [-0.5] * 4, [0.5] * 4]
    assert all(s.advantage_R.dtype == torch.float32 and s.mask_R.all() for s in batch.sequences)
    assert batch.num_tokens == 12


def test_case_L6_lengths_are_those_of_generation_not_of_the_loss():
    rollouts = (rollout(0, 0, length=2, reward=1.0), rollout(0, 1, length=8, reward=0.0, finish="length"))
    groups = [Group(group_id=0, rollouts=rollouts)]
    batch = pack(groups, advantages_of(groups), truncated="mask")
    assert [int(s.mask_R.sum()) for s in batch.sequences] == [2, 0]
    assert batch.sequences[0].advantage_R[0] > 0  # the masked one is still in the baseline
    metrics = rollout_metrics(groups)
    assert (metrics["rollout/response_length_min"], metrics["rollout/response_length_max"]) == (2.0, 8.0)
    assert metrics["rollout/response_length"] == 5.0
    assert metrics["rollout/truncated_share"] == 0.5
    assert [int(s.mask_R.sum()) for s in pack(groups, advantages_of(groups)).sequences] == [2, 8]


def test_case_M3_tokens_and_log_probabilities_of_different_number_are_refused():
    bad = replace(rollout(4, 1, reward=1.0), logp_R=torch.zeros(3))
    with pytest.raises(MismatchError, match=r"prompt 4, sample 1.*2 tokens, 3 log-probabilities"):
        pack([Group(group_id=4, rollouts=(bad,))], [0.0])


def test_a_batch_of_nothing_and_an_unknown_rule_are_refused():
    with pytest.raises(EmptyBatchError):
        pack([], [])
    with pytest.raises(ConfigError, match="keep, mask"):
        pack([group(0, 1.0)], [0.0], truncated="drop")


def test_rollouts_find_their_group_whatever_their_order():
    made = [rollout(i, s) for i in (5, 2) for s in range(3)]
    shuffled = random.Random(0).sample(made, len(made))
    groups = group_rollouts(shuffled)
    assert [g.group_id for g in groups] == [2, 5]
    assert [[r.request.sample for r in g.rollouts] for g in groups] == [[0, 1, 2]] * 2


def test_requests_name_prompt_sample_and_seed():
    prompt = Prompt(prompt_index=9, text="x", tokens=(1, 2), answer="", data_source="")
    requests = make_requests([prompt], 2, seed=11, sampling=Sampling())
    assert [(r.prompt_index, r.sample, r.prompt_tokens, r.seed) for r in requests] == [
        (9, 0, (1, 2), 11),
        (9, 1, (1, 2), 11),
    ]


def test_the_summary_counts_answers_and_groups_that_teach_nothing():
    different = (rollout(1, 0, text="a", reward=1.0), rollout(1, 1, text="b", reward=0.0))
    groups = [Group(group_id=1, rollouts=different), group(2, 1.0, 1.0, text="a"), group(3, None, None)]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/num"] == 6.0
    assert metrics["rollout/distinct_answers"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert metrics["rollout/constant_groups"] == pytest.approx(2 / 3)
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/raw_reward_std"] == pytest.approx(0.5)
    assert [is_informative(g) for g in groups] == [True, False, False]
    assert rollout_metrics([]) == {}
    named = [replace(r, rewards=parts) for r, parts in zip(different, ({"a": 1.0, "b": 3.0}, {"a": 0.0}), strict=True)]
    metrics = rollout_metrics([Group(group_id=1, rollouts=tuple(named))])
    assert (metrics["rollout/reward/a"], metrics["rollout/reward/b"]) == (0.5, 3.0)
    assert "rollout/raw_reward" not in rollout_metrics([group(3, None)])
