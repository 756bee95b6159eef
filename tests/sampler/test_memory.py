"""Memory that runs out during a call or a commit: the engine serves on, the same version, the same bytes."""

from __future__ import annotations

import pytest
import torch

from onegrid.errors import SyncError
from onegrid.sampler import generation, intake
from onegrid.sync.transaction import push
from tests.bytes import assert_same_bytes
from tests.sampler.test_engine import bytes_of
from tests.sampler.tiny import engine_of, plan_of, requests_of, snapshot_of


def failing(real, at: int):
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("no room for 1 tensor")
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_call_that_ran_out_of_memory_leaves_an_engine_that_serves(model, at, monkeypatch):
    engine, requests = engine_of(model, "mxfp8", max_slots=5), requests_of(12)
    want = engine.generate(requests)
    monkeypatch.setattr(generation, "log_probs", failing(generation.log_probs, at))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.generate(requests)
    assert any("sampler.max_slots (now 5)" in note for note in caught.value.__notes__)
    assert_same_bytes(bytes_of(engine.generate(requests)), bytes_of(want))


@pytest.mark.parametrize("where", ["_scratch_for", "digests", "count_moved"])
def test_a_commit_that_ran_out_of_memory_leaves_the_version_before(where, monkeypatch):
    spec, plan = plan_of("dense", "mxfp8")
    engine, requests = engine_of("dense", "mxfp8"), requests_of(6)
    want = engine.generate(requests)
    with monkeypatch.context() as patch:
        patch.setattr(intake, where, failing(getattr(intake, where), 1))
        with pytest.raises(SyncError, match=r"OutOfMemoryError.*lower sampler\.max_slots"):
            push(snapshot_of(spec, plan, 1, version=1), engine)
    assert engine.version == 0
    assert_same_bytes(bytes_of(engine.generate(requests)), bytes_of(want))
    push(snapshot_of(spec, plan, 2, version=2), engine)
    fresh = engine_of("dense", "mxfp8", 2)
    assert_same_bytes([r.logp_R for r in engine.generate(requests)], [r.logp_R for r in fresh.generate(requests)])


def test_a_small_share_of_a_gpu_is_left_usable(gpu):
    engine = engine_of("dense", "mxfp8", device=gpu, max_slots=512, max_len=128)
    few, many = requests_of(6), requests_of(512, samples=1, max_new_tokens=100)
    want = engine.generate(few)
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine.generate(many)
        assert any("sampler.max_slots (now 512)" in note for note in caught.value.__notes__)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_bytes(bytes_of(engine.generate(few)), bytes_of(want))
    assert len(engine.generate(many)) == 512
