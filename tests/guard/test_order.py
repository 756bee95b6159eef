"""Orders of events that a synchronization must survive: what serves is one version, whole, or nothing."""

from __future__ import annotations

import pytest

from onegrid.errors import SyncError
from onegrid.guard.injection import wrap
from onegrid.rl.loop import snapshot
from onegrid.study.corruptions import whole
from onegrid.sync import buckets, manifest_of
from onegrid.types import Request, Sampling
from tests.guard.pair import Pair


def test_sleep_and_wake_between_receive_and_commit_keep_the_old_version_and_then_bring_the_new_one():
    pair = Pair()
    pair.sync()
    pair.update()
    held = snapshot(pair.learner)
    pair.sampler.begin(manifest_of(held))
    for bucket in buckets(held, 4096):
        pair.sampler.receive(bucket)
    pair.sampler.sleep()
    pair.sampler.wake()
    assert whole(pair.bench, 0)
    pair.sampler.commit(held.version)
    assert whole(pair.bench, 1)


def test_a_push_into_an_open_transaction_ends_it_and_its_late_buckets_are_refused():
    pair = Pair()
    pair.sync()
    pair.update()
    held = snapshot(pair.learner)
    first, *late = buckets(held, 4096)
    pair.sampler.begin(manifest_of(held))
    pair.sampler.receive(first)
    pair.sync()
    with pytest.raises(SyncError, match="receive without begin"):
        pair.sampler.receive(late[0])
    assert whole(pair.bench, 1)


def test_an_interruption_half_way_through_the_swap_never_serves_a_mixture():
    pair = Pair()
    pair.sync()
    pair.update()
    intake, calls = pair.sampler.intake, []

    def swap(original):
        calls.append(1)
        if len(calls) > 1:
            return original()
        staged, half = intake._staged, len(intake._staged) // 2
        intake._staged = dict(list(staged.items())[:half])
        try:
            original()
        finally:
            intake._staged = staged
        raise KeyboardInterrupt

    wrap(intake, "swap", swap)
    with pytest.raises(KeyboardInterrupt):
        pair.sync()
    asked = Request(prompt_index=0, sample=0, prompt_tokens=(3,), seed=0, sampling=Sampling(max_new_tokens=1))
    with pytest.raises(SyncError, match="synchronize first"):
        pair.sampler.generate([asked])
    pair.sync()
    assert whole(pair.bench, 1)
