"""The host's part of captured generation on a CPU: steps run where a GPU would replay them, one call behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.errors import NonFiniteError
from onegrid.sampler import captured, graphs
from onegrid.sampler.prefill import Model
from tests.bytes import assert_same_bytes
from tests.sampler.test_engine import bytes_of
from tests.sampler.tiny import engine_of, requests_of


class Launched(graphs.Graphs):
    """A step by its launches: what a graph of it would do, in the same storage."""

    rows: list[int]

    def replay(self, model, num_rows, sampling):
        rows = graphs.bucket(num_rows, self.num_slots)
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
        graphs.step(model, self.cache, self.state, rows, sampling.temperature, stops, sampling.record_routing)
        self.rows.append(num_rows)


class Arrived:
    """An event of a device that is never behind."""

    def record(self):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


@pytest.fixture
def pair(monkeypatch):
    """(model, preset) -> an engine that decodes step by step, and one with the loop of captured steps."""
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Event", Arrived)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(Model, "draw", lambda self, *of: self.weights.kernels.draw(*of)[0])

    def make(model, preset, slots=16):
        one, other = (engine_of(model, preset, max_slots=slots) for _ in range(2))
        spec = other.weights.spec
        held = Launched(
            other.cache, max_len=other.config.max_len, hidden_size=spec.hidden_size, device=other.weights.device
        )
        held.rows, other.graphs = [], held
        return one, other

    return make


CASES = [("dense", "bf16"), ("moe", "mxfp8"), ("shared", "nvfp4_all")]
SAMPLINGS = [{}, {"temperature": 0.0}, {"stop_token_ids": tuple(range(0, 40, 3))}]


@pytest.mark.parametrize(("model", "preset"), CASES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["drawn", "most likely", "until a stop token"])
def test_whoever_ends_first_leaves_and_every_completion_has_the_bytes_of_the_steps_one_by_one(
    model, preset, sampling, pair
):
    one, other = pair(model, preset)
    requests = requests_of(9, samples=3, **sampling)
    want = one.generate(requests)
    assert_same_bytes(bytes_of(other.generate(requests)), bytes_of(want))
    if "stop_token_ids" in sampling:
        assert len({len(r.tokens_R) for r in want}) > 3 and {r.finish for r in want} >= {"stop"}
        assert len(set(other.graphs.rows)) > 3  # slots were closed and filled again


def test_where_one_scale_spans_all_rows_whoever_has_just_ended_has_no_say_in_it(pair):
    one, other = pair("dense", "fp8_tensor")
    requests = requests_of(7, samples=1, stop_token_ids=tuple(range(0, 40, 4)))
    want = one.generate(requests)
    assert len({len(r.tokens_R) for r in want}) > 2
    assert_same_bytes(bytes_of(other.generate(requests)), bytes_of(want))
    prompts = [(5,), (1, 2, 3), tuple(range(30))]
    for prompt in prompts:  # one at a time: they would have one scale together
        assert_same_bytes(other.probe([prompt], captured=True), other.probe([prompt], captured=True))


def test_routes_of_experts_are_those_of_the_steps_one_by_one(pair):
    one, other = pair("moe", "mxfp8")
    requests = requests_of(10, samples=2, record_routing=True, stop_token_ids=tuple(range(0, 40, 5)))
    want, have = one.generate(requests), other.generate(requests)
    assert_same_bytes([r.routing_RLE for r in have], [r.routing_RLE for r in want])


def test_routes_of_a_response_that_fills_its_slot_are_all_there(pair):
    one, other = pair("moe", "bf16")
    requests = requests_of(2, samples=2, record_routing=True, stop_token_ids=(), max_new_tokens=63)
    want, have = one.generate(requests), other.generate(requests)
    assert [len(r.tokens_R) + len(r.request.prompt_tokens) for r in have] == [other.config.max_len] * 2
    assert_same_bytes([r.routing_RLE for r in have], [r.routing_RLE for r in want])


def test_logits_of_a_few_rows_at_a_time_give_the_same_bytes(pair, monkeypatch):
    one, other = pair("dense", "mxfp8", slots=48)
    requests = requests_of(40, stop_token_ids=tuple(range(0, 40, 3)))
    want = bytes_of(one.generate(requests))
    monkeypatch.setattr(graphs, "LOGITS", 1)
    assert_same_bytes(bytes_of(other.generate(requests)), want)


def test_a_call_that_breaks_off_in_the_middle_leaves_nothing_to_the_next(pair):
    one, other = pair("dense", "mxfp8")
    requests = requests_of(20, samples=1, stop_token_ids=tuple(range(0, 40, 4)))

    def no_more(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        other.generate(requests, no_more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "_Leaving", no_more)
        with pytest.raises(TypeError):
            other.generate(requests)
    assert_same_bytes(bytes_of(other.generate(requests)), bytes_of(one.generate(requests)))


def test_a_probe_between_two_calls_changes_neither(pair):
    one, other = pair("moe", "nvfp4_all")
    requests = requests_of(6, samples=1)
    prompts = [(5,), (1, 2, 3), tuple(range(39))]
    before = bytes_of(other.generate(requests))
    assert_same_bytes(other.probe(prompts, captured=True), one.probe(prompts))
    assert_same_bytes(bytes_of(other.generate(requests)), before)
    assert_same_bytes(before, bytes_of(one.generate(requests)))


def test_logits_that_are_not_finite_in_the_last_step_are_refused_too(pair):
    _, other = pair("dense", "bf16")
    real, calls = other.weights.kernels.draw, []

    def draw(*of):
        calls.append(None)
        token, token_logp, finite = real(*of)
        return token, token_logp, finite & (len(calls) < 4)

    other.weights.kernels = dataclasses.replace(other.weights.kernels, draw=draw)
    with pytest.raises(NonFiniteError, match="not finite"):
        other.generate(requests_of(2, samples=1, max_new_tokens=4))
