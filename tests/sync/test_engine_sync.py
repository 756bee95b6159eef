"""The embedded engine under synchronization: like a fresh load every time, in the same storage."""

from __future__ import annotations

import pytest
import torch

from onegrid.errors import SyncError
from onegrid.model.canonical import raw_bytes
from onegrid.model.live import LiveWeights
from onegrid.sampler import intake
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import loaded, plan_of, requests_of, snapshot_of

PAIRS = [("moe", "mxfp8"), ("moe", "nvfp4_experts"), ("dense", "fp8_block"), ("dense", "fp8_tensor"), ("moe", "bf16")]


def empty_engine(model, preset, device="cpu"):
    """An engine without weights."""
    spec, plan = plan_of(model, preset)
    config = SamplerConfig(max_slots=8, max_len=64)
    return spec, plan, Engine(LiveWeights(spec, plan, side="sampler", device=device), config)


def storage(engine: Engine) -> list[torch.Tensor]:
    """Every tensor that a forward pass reads."""
    parts = [x for name in engine.weights.names() for x in engine.weights.parts(name).values()]
    operands = [x for o in engine.weights.operands.values() for x in (o.values, o.row, o.block) if x is not None]
    return parts + operands


def answers(engine: Engine) -> list[torch.Tensor]:
    """Tokens and log-probabilities of fixed requests."""
    rollouts = engine.generate(requests_of(6))
    return [x for r in rollouts for x in (r.tokens_R, r.logp_R)]


@pytest.mark.parametrize(("model", "preset"), PAIRS)
def test_case_W2_three_syncs_are_like_three_fresh_loads_in_one_storage(model, preset, device):
    spec, plan, engine = empty_engine(model, preset, device)
    with pytest.raises(SyncError, match="synchronize first"):
        answers(engine)
    addresses = None
    for version, seed in enumerate([1, 2, 1]):
        snapshot = snapshot_of(spec, plan, seed, version=version)
        report = push(snapshot, engine, bucket_bytes=1000, order=version)
        expected = Engine(loaded(snapshot, spec, plan, device), engine.config, version=version)
        assert_same_bytes(storage(engine), storage(expected))
        assert_same_bytes(answers(engine), answers(expected))
        addresses = addresses or [x.data_ptr() for x in storage(engine)]
        assert [x.data_ptr() for x in storage(engine)] == addresses
        assert engine.version == version
        assert (report.codes_changed_share is None) == (version == 0)


@pytest.mark.parametrize(("small", "scratch"), [(0, 50), (200, 333), (1 << 20, 4000), (1 << 20, 1 << 26)])
def test_small_parts_go_together_and_large_ones_alone_to_the_same_bytes_there_and_back(
    small, scratch, monkeypatch, device
):
    monkeypatch.setattr(intake, "SMALL_BYTES", small)
    monkeypatch.setattr(intake, "SCRATCH_BYTES", scratch)
    spec, plan, engine = empty_engine("moe", "nvfp4_experts", device)
    push(snapshot_of(spec, plan, 1, version=1), engine, bucket_bytes=777)
    before = [x.clone() for x in storage(engine)]
    snapshot = snapshot_of(spec, plan, 2, version=2)
    push(snapshot, engine)
    assert_same_bytes(storage(engine), storage(Engine(loaded(snapshot, spec, plan, device), engine.config, version=2)))
    engine.abort()
    assert engine.version == 1
    assert_same_bytes(storage(engine), before)


def test_case_W1_one_byte_at_a_time_into_the_engine():
    spec, plan, engine = empty_engine("moe", "mxfp8")
    snapshot = snapshot_of(spec, plan, 1, version=3)
    push(snapshot, engine, bucket_bytes=61, order=5)
    assert_same_bytes(storage(engine), storage(Engine(loaded(snapshot, spec, plan), engine.config, version=3)))


def test_case_W5_the_engine_drops_what_older_weights_computed():
    spec, plan, engine = empty_engine("dense", "bf16")
    push(snapshot_of(spec, plan, 1, version=1), engine)
    engine.generate(requests_of(16, samples=16))  # more samples than slots: the prompt is kept
    assert engine.prefixes.get(1, requests_of(1)[0].prompt_tokens) is not None
    push(snapshot_of(spec, plan, 2, version=2), engine)
    assert all(engine.prefixes.get(v, requests_of(1)[0].prompt_tokens) is None for v in (1, 2))
    expected = Engine(loaded(snapshot_of(spec, plan, 2, version=2), spec, plan), engine.config, version=2)
    assert_same_bytes(answers(engine), answers(expected))


def test_case_W9_a_failed_sync_leaves_the_engine_serving():
    spec, plan, engine = empty_engine("moe", "mxfp8")
    push(snapshot_of(spec, plan, 1, version=1), engine)
    before, expected = [x.clone() for x in storage(engine)], answers(engine)

    class Flipped(type(engine.weights)):
        def derive(self, keys=None):
            super().derive(keys)
            if bad := not self.flipped:
                self.operands["model.layers.1.mlp.experts.up_proj.weight"].values[2, 0, 0] += 1
            self.flipped = bad or self.flipped

    engine.weights.__class__, engine.weights.flipped = Flipped, False
    with pytest.raises(SyncError) as caught:
        push(snapshot_of(spec, plan, 2, version=2), engine)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert (caught.value.condition, caught.value.tensors) == ("C3", (name,))
    assert engine.version == 1
    assert_same_bytes(storage(engine), before)
    assert_same_bytes(answers(engine), expected)
    push(snapshot_of(spec, plan, 2, version=2), engine)
    assert engine.version == 2


def test_one_flipped_byte_anywhere_changes_the_digest_of_that_tensor():
    spec, plan, engine = empty_engine("moe", "nvfp4_experts")
    push(snapshot_of(spec, plan, 1, version=1), engine)
    names = engine.weights.names()
    before = engine.digest(names)
    for name in names[::5]:
        for x in engine.weights.parts(name).values():
            raw_bytes(x)[-1] ^= 1
            engine.weights.derive()
            assert [n for n, value in engine.digest(names).items() if value != before[n]] == [name]
            raw_bytes(x)[-1] ^= 1
    engine.weights.derive()
    assert engine.digest(names) == before
    with pytest.raises(SyncError, match="no such tensor in the sampler: lm_head"):
        engine.digest(["lm_head"])
