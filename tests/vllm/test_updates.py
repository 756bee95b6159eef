"""Updates of a real engine: whole or not at all, in place, whatever the buckets, again and again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.model.canonical import parts_of, raw_bytes
from onegrid.sync import buckets, manifest_of
from onegrid.types import Bucket
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import requests_of
from tests.vllm.engines import kernel_reads, numbers, start

pytestmark = pytest.mark.filterwarnings("ignore")


def tokens(running):
    """What it says, and how likely that is."""
    return [(r.tokens_R.tolist(), r.logp_R.tolist()) for r in running.sampler.generate(requests_of(6))]


@pytest.mark.parametrize("bucket_bytes", [251, 4096, 1 << 26])
def test_case_W1_buckets_of_any_size_and_order_give_the_same_engine(moe, bucket_bytes):
    first = moe.snapshot(seed=1)
    moe.push(first)
    expected = tokens(moe)
    moe.push(moe.snapshot(seed=2))
    again = moe.snapshot(seed=1)
    report = moe.push(again, bucket_bytes=bucket_bytes, order=bucket_bytes)
    assert report.num_buckets == -(-report.num_bytes // bucket_bytes)
    assert tokens(moe) == expected


def test_case_W1_a_partner_that_never_comes_is_named(moe):
    before, said = moe.sampler.version, tokens(moe)
    snapshot = moe.snapshot()
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    moe.sampler.begin(manifest_of(snapshot))
    for bucket in buckets(snapshot):
        kept = tuple(p for p in bucket.pieces if not (p.name == lost and p.part == "scales"))
        moe.sampler.receive(Bucket(version=bucket.version, pieces=kept))
    with pytest.raises(SyncError, match="never arrived") as caught:
        moe.sampler.commit(snapshot.version)
    assert caught.value.tensors == (lost,) and caught.value.condition == "C5"
    moe.sampler.abort()
    assert moe.sampler.version == before and tokens(moe) == said


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_case_W2_every_sync_is_like_the_first_and_storage_stays(kind, request):
    running = request.getfixturevalue(kind)
    addresses = running.inside.where()
    running.push(running.snapshot(seed=1))
    first = tokens(running)
    running.push(running.snapshot(seed=2))
    assert tokens(running) != first
    running.push(running.snapshot(seed=1))
    assert tokens(running) == first
    assert running.inside.where() == addresses
    fresh = start(kind, "mxfp8", dtype=running.sampler.config.dtype)
    try:
        fresh.push(fresh.snapshot(seed=1))
        assert tokens(fresh) == first
    finally:
        fresh.sampler.close()


def test_what_kernels_multiply_by_is_what_was_sent(dense):
    snapshot = dense.snapshot()
    dense.push(snapshot)
    for name, tensor in snapshot.tensors.items():
        if name.endswith("_proj.weight"):
            assert_same_bytes(kernel_reads(dense, name).to(torch.bfloat16) + 0.0, numbers(tensor) + 0.0)


def test_case_W3_scales_that_were_not_sent_are_named_and_the_old_version_serves(dense):
    before, said = dense.sampler.version, tokens(dense)
    snapshot = dense.snapshot()
    dense.sampler.begin(manifest_of(snapshot))
    for bucket in buckets(snapshot):
        dense.sampler.receive(
            Bucket(version=bucket.version, pieces=tuple(p for p in bucket.pieces if p.part != "scales"))
        )
    with pytest.raises(SyncError, match="scales") as caught:
        dense.sampler.commit(snapshot.version)
    assert len(caught.value.tensors) == 14
    dense.sampler.abort()
    assert dense.sampler.version == before and tokens(dense) == said


def test_case_W3_after_sleep_nothing_serves_until_every_tensor_and_buffer_is_proved(dense):
    said = tokens(dense)
    dense.sampler.sleep()
    with pytest.raises(CapabilityError, match="sleeps"):
        dense.sampler.generate(requests_of(1))
    dense.sampler.wake()
    assert tokens(dense) == said
    table = dense.inside.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    kept = table.clone()
    dense.sampler.sleep()
    table.zero_()
    with pytest.raises(SyncError, match="rotary_emb"):
        dense.sampler.wake()
    with pytest.raises((SyncError, CapabilityError)):
        dense.sampler.generate(requests_of(1))
    table.copy_(kept)
    dense.sampler.wake()
    assert tokens(dense) == said


def test_case_W3_scales_of_the_cache_are_one_and_stay_so(dense, moe):
    for running in (dense, moe):
        scales = [x for n, x in running.inside.model.named_buffers() if n.endswith(("._k_scale", "._v_scale"))]
        assert len(scales) == 4 and all(float(x) == 1.0 for x in scales)


def test_case_W5_no_prefix_of_the_version_before_is_found(dense):
    prompt = tuple(i % 40 for i in range(70))
    long = dataclasses.replace(requests_of(1)[0], prompt_tokens=prompt)
    dense.push(dense.snapshot(seed=1))
    fresh = dense.sampler.generate([long])[0]
    dense.push(dense.snapshot(seed=2))
    dense.sampler.generate([long])
    assert dense.sampler.engine.canary() is False and dense.sampler.engine.canary() is True, "the cache is in use"
    dense.push(dense.snapshot(seed=1))
    assert dense.sampler.cached_versions() == {dense.sampler.version}
    again = dense.sampler.generate([long])[0]
    assert again.tokens_R.tolist() == fresh.tokens_R.tolist() and again.logp_R.tolist() == fresh.logp_R.tolist()


def test_case_W9_a_failure_at_any_bucket_leaves_the_old_version_serving(moe):
    before, said = moe.sampler.version, tokens(moe)
    snapshot = moe.snapshot()
    pieces = list(buckets(snapshot, 1 << 14))
    for at in range(0, len(pieces), max(1, len(pieces) // 6)):
        moe.sampler.begin(manifest_of(snapshot))
        for bucket in pieces[:at]:
            moe.sampler.receive(bucket)
        moe.sampler.abort()
        assert moe.sampler.version == before
    assert tokens(moe) == said
    moe.push(snapshot)
    assert moe.sampler.version == snapshot.version > before


def test_case_W9_versions_only_grow(moe):
    snapshot = moe.snapshot()
    moe.push(snapshot)
    with pytest.raises(SyncError, match="versions only grow") as caught:
        moe.push(snapshot)
    assert caught.value.condition == "C7"


def test_a_commit_that_is_refused_is_undone_in_the_engine(dense):
    said = tokens(dense)
    before = dense.sampler.version

    def refuse(manifest, sampler):
        raise SyncError("no", condition="C6")

    with pytest.raises(SyncError, match="no"):
        dense.push(prove=refuse)
    assert dense.sampler.version == before and tokens(dense) == said


def test_the_share_of_codes_that_moved_is_told(moe):
    one = moe.snapshot(seed=5)
    moe.push(one)
    assert moe.push(moe.snapshot(seed=5)).codes_changed_share == 0.0
    assert 0.9 < moe.push(moe.snapshot(seed=6)).codes_changed_share < 1.0


@pytest.mark.parametrize("cycles", [3])
def test_case_W8_merged_adapters_come_and_go_without_drift(cycles):
    running = start("dense", "bf16", dtype="float32")
    try:
        base = running.snapshot(seed=1)
        name = "model.layers.0.self_attn.q_proj.weight"
        generator = torch.Generator().manual_seed(0)
        factors = torch.randn(128, 2, generator=generator), torch.randn(2, 64, generator=generator)
        for _ in range(cycles):
            merged = running.snapshot(seed=1)
            wide = merged.tensors[name].float() + 0.003 * (factors[0] @ factors[1])
            merged.tensors[name].copy_(wide.to(torch.bfloat16))
            running.push(merged)
            assert_same_bytes(kernel_reads(running, name).to(torch.bfloat16), merged.tensors[name])
            running.push(running.snapshot(seed=1))
            for other, tensor in base.tensors.items():
                for part, x in parts_of(tensor).items():
                    assert_same_bytes(raw_bytes(running.sampler.stored(other)[part]), raw_bytes(x))
            assert_same_bytes(kernel_reads(running, name).to(torch.bfloat16), base.tensors[name])
    finally:
        running.sampler.close()


def test_an_engine_in_a_process_of_its_own_says_the_same(moe):
    moe.push(moe.snapshot(seed=3))
    apart = start("moe", "mxfp8", apart=True)
    try:
        apart.push(apart.snapshot(seed=3))
        assert tokens(apart) == tokens(moe)
        told = apart.sampler.describe()
        assert told == moe.sampler.describe()
        for one, other in zip(*(running.sampler.probe([(1, 2, 3), (4,)]) for running in (apart, moe)), strict=True):
            assert_same_bytes(one, other)
        assert apart.push(apart.snapshot(seed=4)).version == apart.sampler.version
        assert apart.sampler.cached_versions() == {apart.sampler.version}
        folder = apart.sampler.store.folder
        assert folder.exists()
    finally:
        apart.sampler.close()
    assert not folder.exists(), "nothing stays in shared memory"
