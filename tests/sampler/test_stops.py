"""Where a completion ends, and that ids and log-probabilities end together."""

from __future__ import annotations

import pytest
import torch

from onegrid.sampler.fake import FakeSampler
from onegrid.sampler.scheduler import Scheduler
from onegrid.sampler.stops import hit_stop_string, hit_stop_token, text_of
from onegrid.types import Request, Sampling
from tests.sync.toy import snapshot_of

CPU = torch.device("cpu")


def letters(tokens: list[int]) -> str:
    """a for 0, b for 1, ..."""
    return "".join(chr(97 + token) for token in tokens)


def scripted(outputs: list[list[int]], sampling: Sampling, max_slots: int) -> dict[int, tuple[list[int], str]]:
    """Runs a scheduler over given tokens: request -> (tokens, finish)."""
    requests = [
        Request(prompt_index=i, sample=0, prompt_tokens=(1,), seed=0, sampling=sampling) for i in range(len(outputs))
    ]
    scheduler = Scheduler(requests, sampling, max_slots=max_slots, device=CPU)
    done = {}
    while scheduler.waiting or scheduler.num_running:
        scheduler.admit()
        rows = list(range(scheduler.num_running))
        owners = [int(scheduler.request_S[row]) for row in rows]
        token_N = torch.tensor([outputs[o][int(scheduler.length_S[row])] for row, o in zip(rows, owners, strict=True)])
        scheduler.append(token_N, -token_N.float())
        scheduler.end(hit_stop_token(token_N, sampling))
        ended, source, target = scheduler.leave()
        for slot in ended.tolist():
            length = int(scheduler.length_S[slot])
            tokens, logp = scheduler.tokens_SR[slot, :length].tolist(), scheduler.logp_SR[slot, :length].tolist()
            assert logp == [-float(t) for t in tokens]
            done[int(scheduler.request_S[slot])] = (tokens, "stop" if scheduler.stopped_S[slot] else "length")
        scheduler.move(source, target, len(ended))
    return done


@pytest.mark.parametrize("max_slots", [1, 2, 3, 8])
def test_case_M3_the_stop_token_is_kept_once_and_absent_at_the_cap(max_slots):
    sampling = Sampling(stop_token_ids=(2, 11), max_new_tokens=4)
    outputs = [[5, 6, 2, 9], [5, 11, 9, 9], [5, 6, 7, 8], [2, 9, 9, 9], [5, 6, 7, 2], [8, 8, 8, 8]]
    assert scripted(outputs, sampling, max_slots) == {
        0: ([5, 6, 2], "stop"),
        1: ([5, 11], "stop"),
        2: ([5, 6, 7, 8], "length"),
        3: ([2], "stop"),
        4: ([5, 6, 7, 2], "stop"),
        5: ([8, 8, 8, 8], "length"),
    }


def test_case_M3_a_stop_string_that_spans_two_tokens():
    sampling = Sampling(stop_strings=("ef", "zz"))
    tokens = torch.tensor([[3, 4, 5, 0], [3, 5, 4, 0], [4, 0, 5, 0]])
    assert hit_stop_string(tokens, torch.tensor([3, 3, 3]), sampling, letters).tolist() == [True, False, False]
    assert hit_stop_string(tokens, torch.tensor([2, 2, 2]), sampling, letters).tolist() == [False, False, False]
    assert text_of([3, 4, 5], "stop", sampling, letters) == "d"
    assert text_of([3, 4, 5], "length", sampling, letters) == "def"
    assert text_of([3, 4, 2], "stop", Sampling(stop_token_ids=(2,)), letters) == "de"
    assert text_of([3, 4, 2], "length", Sampling(stop_token_ids=(2,)), letters) == "dec"
    assert text_of([3], "stop", sampling, None) == ""


def test_a_stop_string_is_seen_at_the_end_of_a_long_text():
    sampling = Sampling(stop_strings=("yz",))
    tokens = torch.tensor([[0] * 500 + [24, 25]])
    assert hit_stop_string(tokens, torch.tensor([502]), sampling, letters).tolist() == [True]


@pytest.mark.parametrize("stop", [{"stop_token_ids": (2, 11)}, {"stop_strings": ("cl", "d")}, {}], ids=str)
def test_case_M3_ids_and_log_probs_have_equal_length_whatever_ends_a_completion(stop):
    sampler = FakeSampler(snapshot_of(0, 0), version=0, decode_text=letters)
    sampling = Sampling(max_new_tokens=12, temperature=2.0, **stop)
    requests = [Request(prompt_index=i, sample=0, prompt_tokens=(1,), seed=0, sampling=sampling) for i in range(20)]
    finishes = set()
    for rollout in sampler.generate(requests):
        tokens = rollout.tokens_R.tolist()
        assert len(tokens) == len(rollout.logp_R) == len(rollout.version_R)
        assert bool(torch.isfinite(rollout.logp_R).all())
        inside = tokens[:-1] if rollout.finish == "stop" else tokens
        assert not set(inside) & set(sampling.stop_token_ids)
        assert not any(s in letters(inside) for s in sampling.stop_strings)
        assert rollout.finish == "stop" or len(tokens) == 12
        finishes.add(rollout.finish)
    assert finishes == ({"length"} if not stop else {"stop", "length"})


@pytest.mark.parametrize("max_slots", [1, 3, 7])
def test_running_completions_stay_a_prefix_of_the_slots(max_slots):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randint(0, 9, (40, 10), generator=generator).tolist()
    sampling = Sampling(stop_token_ids=(0, 4), max_new_tokens=10)
    done = scripted(outputs, sampling, max_slots)
    assert sorted(done) == list(range(40))
    for index, (tokens, finish) in done.items():
        ends = [at for at, token in enumerate(outputs[index]) if token in (0, 4)]
        length = min([*ends, 9]) + 1
        assert tokens == outputs[index][:length]
        assert finish == ("stop" if ends else "length")
