"""Routing recorded at sampling: equal to what the learner finds, and visited where that is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onegrid.errors import CapabilityError
from onegrid.types import Batch
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import requests_of
from tests.sync.test_learner_pairing import batch_of, learner_of, sync


@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4_experts"])
@pytest.mark.parametrize("model", ["moe", "shared"])
def test_recorded_routes_are_the_recomputed_ones_and_replaying_them_changes_no_bit(model, preset, device):
    batch, found = None, []
    for replay in (False, True):
        learner, engine = learner_of(model, preset, device=device, replay_routing=replay)
        sync(learner, engine)
        batch = batch or batch_of(engine.generate(requests_of(9, record_routing=True)))
        report = learner.forward_backward(batch)
        assert report.metrics["mismatch/routing_share_equal"] == 1.0
        found.append(([x.cpu() for x in report.logp], {k: m.grad for k, m in learner.masters.items()}))
    assert_same_bytes(found[0][0], [s.sampler_logp_R for s in batch.sequences])
    assert_same_bytes(found[1][0], found[0][0])
    for key, grad in found[0][1].items():
        assert (grad is None) == (found[1][1][key] is None)
        if grad is not None:
            assert_same_bytes(found[1][1][key], grad, key)


def test_another_record_is_seen_and_visited(device):
    learner, engine = learner_of("moe", "mxfp8", device=device, replay_routing=True)
    sync(learner, engine)
    batch = batch_of(engine.generate(requests_of(6, record_routing=True)))
    plain = learner.log_probs(batch)
    moved = tuple(replace(s, routing_RLE=(s.routing_RLE + 1) % 4) for s in batch.sequences)
    report = learner.forward_backward(Batch(sequences=moved, temperature=batch.temperature))
    assert report.metrics["mismatch/routing_share_equal"] < 1.0
    assert any(not torch.equal(a, b) for a, b in zip(report.logp, plain, strict=True))


def test_a_replay_without_a_record_says_what_to_set():
    learner, engine = learner_of("moe", "mxfp8", replay_routing=True)
    sync(learner, engine)
    batch = batch_of(engine.generate(requests_of(3)))
    with pytest.raises(CapabilityError, match="record_routing"):
        learner.log_probs(batch)
