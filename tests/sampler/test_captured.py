"""Captured decode steps change no byte: not by batch, order or slots, not after updates in place."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from onegrid.errors import CapabilityError, NonFiniteError
from onegrid.ops.capture import capturing
from onegrid.sampler import graphs
from onegrid.sampler.graphs import bucket
from onegrid.sync.transaction import push
from onegrid.types import Sampling
from tests.bytes import assert_same_bytes
from tests.sampler.test_engine import bytes_of
from tests.sampler.tiny import engine_of, plan_of, requests_of, snapshot_of

PRESETS = ["bf16", "mxfp8", "nvfp4_all", "fp8_block", "fp8_row", "mxfp4"]
CASES = [("dense", preset) for preset in PRESETS]
CASES += [("moe", preset) for preset in ("bf16", "mxfp8", "nvfp4_all", "nvfp4_experts", "fp8_row")]
CASES += [("shared", "mxfp8")]


def test_buckets_are_tiles_that_hold_their_rows():
    for slots in (16, 128, 512):
        for rows in range(1, slots + 1):
            assert rows <= bucket(rows, slots) <= slots and bucket(rows, slots) % 16 == 0
    assert len({bucket(rows, 512) for rows in range(1, 513)}) <= 24


def test_what_ran_longest_ago_makes_room_when_every_call_has_another_temperature(monkeypatch):
    class Step:
        replays = 0

        def replay(self):
            self.replays += 1

    def capture(self, model, rows, sampling):
        self.stops.setdefault(sampling.stop_token_ids, torch.tensor(sampling.stop_token_ids))
        return Step()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graphs.Graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "MOST", 3)
    engine = engine_of("dense", "bf16")
    held = graphs.Graphs(engine.cache, max_len=8, hidden_size=4, device=torch.device("cpu"))
    steady = Sampling(stop_token_ids=(5,))
    for i in range(20):
        held.replay(None, 3, steady)
        held.replay(None, 3, Sampling(temperature=0.5 + i / 100, stop_token_ids=(i + 10,)))
        assert len(held.graphs) == min(i + 2, 3) == len(held.stops)
    assert held.graphs[bucket(3, held.num_slots), 1.0, (5,), False].replays == 20
    held.reset()
    assert not held.graphs and not held.stops


def test_captures_of_two_threads_take_turns_and_the_collector_rests_for_both(monkeypatch):
    inside, seen = threading.Lock(), []

    @contextmanager
    def graph(*_, **__):
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def capture() -> None:
        with capturing(None):
            assert inside.acquire(blocking=False)
            time.sleep(0.002)  # so that the others come meanwhile
            seen.append(gc.isenabled())
            inside.release()

    threads = [threading.Thread(target=capture) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] * 8 and gc.isenabled()


def test_a_cpu_has_no_graphs_and_says_so():
    engine = engine_of("dense", "bf16")
    assert not engine.capabilities.captured
    with pytest.raises(CapabilityError, match="plain kernels"):
        engine.probe([[1, 2]], captured=True)


@pytest.mark.parametrize(("model", "preset"), CASES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7, "max_new_tokens": 20}], ids=str)
def test_captured_generation_gives_the_tokens_of_the_steps_one_by_one(model, preset, sampling, gpu):
    requests = requests_of(40, **sampling)
    expected = engine_of(model, preset, device=gpu, capture=False).generate(requests)
    for config in ({}, {"max_slots": 5}, {"max_slots": 17, "prefix_tokens": 0}):
        engine = engine_of(model, preset, device=gpu, **config)
        assert engine.capabilities.captured
        for _ in range(2):
            got = engine.generate(requests)
            assert_same_bytes(bytes_of(got), bytes_of(expected), str(config))
            assert [(r.finish, r.request) for r in got] == [(r.finish, r.request) for r in expected]


@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4_experts"])
def test_routing_is_recorded_in_captured_steps_as_in_steps_one_by_one(preset, gpu):
    requests = requests_of(40, record_routing=True)
    expected = engine_of("moe", preset, device=gpu, capture=False).generate(requests)
    for config in ({}, {"max_slots": 7}):
        engine = engine_of("moe", preset, device=gpu, **config)
        for asked in (requests, requests_of(40), requests):
            got = engine.generate(asked)
            assert_same_bytes([r.logp_R for r in got], [r.logp_R for r in expected])
            if asked is requests:
                assert_same_bytes([r.routing_RLE for r in got], [r.routing_RLE for r in expected])


@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4_all"])
def test_graphs_stay_valid_when_weights_change_in_place(preset, gpu):
    spec, plan = plan_of("dense", preset)
    engine = engine_of("dense", preset, device=gpu)
    requests = requests_of(20)
    before = engine.generate(requests)
    for version in range(1, 5):
        push(snapshot_of(spec, plan, version, version=version), engine)
        got = engine.generate(requests)
        expected = engine_of("dense", preset, version, device=gpu, capture=False).generate(requests)
        assert_same_bytes([r.logp_R for r in got], [r.logp_R for r in expected])
        assert any(not torch.equal(a.tokens_R, b.tokens_R) for a, b in zip(got, before, strict=True))


def test_a_captured_probe_gives_the_bytes_of_a_prefill(gpu):
    engine = engine_of("dense", "mxfp8", device=gpu)
    prompts = [[3], [1, 2], [7, 7, 7, 9], list(range(30)), *([i, i + 1, 2] for i in range(25))]
    assert_same_bytes(engine.probe(prompts, captured=True), engine.probe(prompts))
    requests = requests_of(6)
    first = engine.generate(requests)
    engine.probe(prompts, captured=True)
    assert_same_bytes(bytes_of(engine.generate(requests)), bytes_of(first))


def test_logits_that_are_not_finite_are_refused_by_name(gpu):
    engine = engine_of("dense", "bf16", device=gpu)
    engine.generate(requests_of(3))
    engine.weights.operands["model.layers.0.mlp.down_proj.weight"].values[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="prompt 0, sample 0"):
        engine.generate(requests_of(3))


def test_sleep_drops_graphs_and_wake_makes_new_ones(gpu):
    engine = engine_of("dense", "bf16", device=gpu)
    requests = requests_of(6)
    first = engine.generate(requests)
    engine.sleep()
    engine.wake()
    assert_same_bytes(bytes_of(engine.generate(requests)), bytes_of(first))


def test_two_engines_of_one_process_keep_their_graphs_apart(gpu):
    requests = requests_of(20)
    engines = [engine_of("dense", "mxfp8", device=gpu), engine_of("moe", "nvfp4_all", 7, device=gpu)]
    alone = [engine.generate(requests) for engine in engines]
    engines += [engine_of("dense", "mxfp8", device=gpu)]
    for _ in range(2):
        for engine, want in zip(engines, [*alone, alone[0]], strict=True):
            assert_same_bytes(bytes_of(engine.generate(requests)), bytes_of(want))
    del engines[0]
    gc.collect()
    assert_same_bytes(bytes_of(engines[-1].generate(requests)), bytes_of(alone[0]))


def test_an_adopted_plan_is_captured_anew(gpu):
    engine = engine_of("dense", "mxfp8", device=gpu)
    engine.generate(requests_of(5))
    spec, plan = plan_of("dense", "bf16")
    engine.adopt(plan)
    push(snapshot_of(spec, plan, 3, version=1), engine)
    prompts = [[1, 2, 3]]
    assert_same_bytes(engine.probe(prompts, captured=True), engine.probe(prompts))
    expected = engine_of("dense", "bf16", 3, device=gpu, capture=False).generate(requests_of(5))
    assert_same_bytes([r.logp_R for r in engine.generate(requests_of(5))], [r.logp_R for r in expected])


def test_a_capture_that_breaks_off_leaves_an_engine_that_captures(gpu, monkeypatch):
    from onegrid.sampler import graphs

    engine = engine_of("dense", "mxfp8", device=gpu)
    requests, prompts, stream = requests_of(6), [[1, 2, 3], [4, 5]], torch.cuda.current_stream()
    expected = engine_of("dense", "mxfp8", device=gpu, capture=False).generate(requests)
    calls, step = [], graphs.step

    def breaks(*arguments):
        calls.append(step(*arguments))
        if len(calls) == 3:  # two trial runs, then the one that is captured
            torch.cuda.synchronize()  # no capture permits it

    monkeypatch.setattr(graphs, "step", breaks)
    with pytest.raises(RuntimeError):
        engine.probe(prompts, captured=True)
    assert torch.cuda.current_stream() == stream
    for _ in range(2):
        got = engine.generate(requests)
        assert_same_bytes([r.logp_R for r in got], [r.logp_R for r in expected])
        assert_same_bytes([r.tokens_R for r in got], [r.tokens_R for r in expected])
