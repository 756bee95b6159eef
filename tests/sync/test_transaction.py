"""A synchronization arrives whole, in place and proved, or the version before goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.formats import QUANTIZERS, quantize
from onegrid.model.canonical import raw_bytes
from onegrid.sampler.fake import FAULTS, FakeSampler
from onegrid.sync import buckets, manifest_of, push
from onegrid.types import Bucket, Piece
from tests.bytes import assert_same_bytes
from tests.sync.toy import live_parts, parts_by_key, requests_of, snapshot_of


def fresh(seed: int, version: int = 0, **options) -> FakeSampler:
    """A sampler that holds a snapshot without any synchronization."""
    return FakeSampler(snapshot_of(seed, version), version=version, **options)


def answers(sampler: FakeSampler) -> list[torch.Tensor]:
    """Tokens and log-probabilities of fixed requests."""
    rollouts = sampler.generate(requests_of())
    return [x for r in rollouts for x in (r.tokens_R, r.logp_R)]


@pytest.mark.parametrize("bucket_bytes", [1, 2, 64, 1 << 30])
@pytest.mark.parametrize("order", [None, 0, 1])
def test_case_W1_the_result_does_not_depend_on_buckets(bucket_bytes, order, device):
    sampler = FakeSampler(snapshot_of(9, 0), device=device)
    report = push(snapshot_of(1, 1), sampler, bucket_bytes=bucket_bytes, order=order)
    expected = FakeSampler(snapshot_of(1, 1), version=1, device=device)
    assert_same_bytes(live_parts(sampler), live_parts(expected))
    assert report.num_tensors == 5
    assert report.num_bytes == sum(x.nbytes for x in parts_by_key(snapshot_of(1, 1).tensors).values())
    assert report.num_buckets == -(-report.num_bytes // bucket_bytes)


@pytest.mark.parametrize("missing", ["gate", "up", "down"])
def test_case_W1_a_partner_that_never_comes_is_an_error(missing):
    snapshot, sampler = snapshot_of(1, 1), fresh(0)
    before = live_parts(sampler)
    sampler.begin(manifest_of(snapshot))
    for bucket in buckets(snapshot, 10):
        sampler.receive(replace(bucket, pieces=tuple(p for p in bucket.pieces if p.name != missing)))
    with pytest.raises(SyncError, match=f"never arrived: {missing}") as caught:
        sampler.commit(1)
    assert (caught.value.condition, caught.value.tensors) == ("C5", (missing,))
    sampler.abort()
    assert_same_bytes(live_parts(sampler), before)
    assert sampler.version == 0


def test_case_W2_the_second_and_third_sync_are_like_the_first_and_storage_stays(device):
    sampler = FakeSampler(snapshot_of(9, 0), device=device)

    def addresses():
        storage = [*parts_by_key(sampler.store.tensors).values(), *sampler.store.operands.values()]
        return [x.data_ptr() for x in storage]

    before = addresses()
    for version, seed in enumerate([1, 2, 1], start=1):
        push(snapshot_of(seed, version), sampler, bucket_bytes=33)
        expected = FakeSampler(snapshot_of(seed, version), version=version, device=device)
        assert_same_bytes(live_parts(sampler), live_parts(expected))
        assert_same_bytes(answers(sampler), answers(expected))
        assert_same_bytes(sampler.probe([[1, 2]], captured=True), expected.probe([[1, 2]]))
        assert addresses() == before
    with pytest.raises(SyncError, match="commit without begin"):
        sampler.commit(3)


def test_case_W3_scales_that_are_not_sent_are_named():
    snapshot, sampler = snapshot_of(1, 1), FakeSampler(snapshot_of(0, 0))
    with pytest.raises(SyncError, match="no version of the weights is complete"):
        sampler.generate(requests_of())
    sampler.begin(manifest_of(snapshot))
    for bucket in buckets(snapshot):
        sampler.receive(replace(bucket, pieces=tuple(p for p in bucket.pieces if p.part != "scales")))
    with pytest.raises(SyncError, match=r"gate \[scales\] 12 of 12 bytes") as caught:
        sampler.commit(1)
    assert caught.value.tensors == ("gate", "up", "down", "row")
    sampler.abort()
    with pytest.raises(SyncError, match="no version of the weights is complete"):
        sampler.generate(requests_of())

    without = manifest_of(snapshot)
    entry = without.entries["gate"]
    without.entries["gate"] = replace(entry, parts={"codes": entry.parts["codes"]})
    with pytest.raises(SyncError, match="gate comes with shape") as caught:
        sampler.begin(without)
    assert (caught.value.condition, caught.value.tensors) == ("C5", ("gate",))


def test_case_W3_after_sleep_nothing_serves_until_everything_is_back():
    sampler = fresh(0, faults=["lose_on_sleep"])
    expected = answers(sampler)
    sampler.sleep()
    with pytest.raises(CapabilityError, match="sleeps"):
        sampler.generate(requests_of())
    with pytest.raises(SyncError, match="norm") as caught:
        sampler.wake()
    assert (caught.value.condition, caught.value.tensors) == ("C2", ("norm",))
    with pytest.raises(SyncError, match="synchronize first"):
        sampler.generate(requests_of())
    push(snapshot_of(0, 0), sampler)  # what was lost may come again under its own version
    assert_same_bytes(answers(sampler), expected)
    assert all(bool(torch.isfinite(x).all()) for x in sampler.store.operands.values())


def test_sleep_and_wake_that_lose_nothing_change_nothing():
    sampler = fresh(0)
    expected = answers(sampler)
    sampler.sleep()
    sampler.wake()
    assert_same_bytes(answers(sampler), expected)


def test_case_W5_cached_prompts_do_not_survive_a_sync():
    sampler = fresh(0)
    before = answers(sampler)
    assert_same_bytes(answers(sampler), before)
    assert sampler.num_prefix_hits == 4
    push(snapshot_of(1, 1), sampler)
    after = answers(sampler)
    assert sampler.num_prefix_hits == 4, "no cached prompt for the first requests of a version"
    assert_same_bytes(after, answers(fresh(1, 1)))
    with pytest.raises(AssertionError):
        assert_same_bytes(after, before)

    stale = fresh(0, faults=["keep_prefix"])
    answers(stale)
    push(snapshot_of(1, 1), stale)
    with pytest.raises(AssertionError):
        assert_same_bytes(answers(stale), after)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_case_W9_an_interrupted_update_leaves_the_version_before(at, failure):
    class Interrupted(FakeSampler):
        received = 0

        def receive(self, bucket):
            if self.received == at:
                raise failure("the wire broke")
            self.received += 1
            super().receive(bucket)

    sampler = Interrupted(snapshot_of(0, 57), version=57)
    snapshot = snapshot_of(1, 58)
    size = -(-sum(x.nbytes for x in parts_by_key(snapshot.tensors).values()) // 3)
    before, expected = live_parts(sampler), answers(sampler)
    with pytest.raises(SyncError if failure is RuntimeError else KeyboardInterrupt):
        push(snapshot, sampler, bucket_bytes=size)
    assert sampler.version == 57
    assert_same_bytes(live_parts(sampler), before)
    assert_same_bytes(answers(sampler), expected)
    sampler.received = 10
    push(snapshot, sampler, bucket_bytes=size)
    assert_same_bytes(answers(sampler), answers(fresh(1, 58)))


def test_case_W9_versions_only_grow():
    sampler = fresh(0, 57)
    for version in (0, 1, 56, 57):
        with pytest.raises(SyncError, match=f"version {version} is offered after 57") as caught:
            push(snapshot_of(1, version), sampler)
        assert caught.value.condition == "C7"
    assert sampler.version == 57
    push(snapshot_of(1, 58), sampler)
    rollouts = sampler.generate(requests_of())
    assert all(bool((r.version_R == 58).all()) for r in rollouts)


def test_a_report_counts_what_moved():
    sampler = fresh(0)
    push(snapshot_of(0, 1), sampler)
    assert push(snapshot_of(0, 2), sampler).codes_changed_share == 0.0
    snapshot = snapshot_of(0, 3)
    snapshot.tensors["gate"].codes[0, :2] ^= 1
    snapshot.tensors["down"].codes[0, 0] ^= 0x11  # two codes to a byte
    snapshot.tensors["norm"][0] += 1
    count = 2 * 6 * 64 + 5 * 32 + 3 * 9 + 7
    assert push(snapshot, sampler).codes_changed_share == 5 / count
    assert push(snapshot_of(1, 1), FakeSampler(snapshot_of(0, 0))).codes_changed_share is None


def piece(**changes) -> Piece:
    """Four bytes for gate's codes, changed."""
    return replace(Piece(name="gate", part="codes", offset=0, data=torch.zeros(4, dtype=torch.uint8)), **changes)


@pytest.mark.parametrize(
    ("pieces", "version", "message"),
    [
        ((piece(), piece(offset=3)), 1, "gate .codes. bytes 3..7: arrived twice"),
        ((piece(name="other"),), 1, "other .* not in the manifest"),
        ((piece(part="amax"),), 1, "gate .amax.* not in the manifest"),
        ((piece(offset=381),), 1, "beyond its 384 bytes"),
        ((piece(offset=-1),), 1, "beyond its 384 bytes"),
        ((piece(data=torch.zeros(4)),), 1, "torch.float32 of 1 axes"),
        ((piece(data=torch.zeros(2, 2, dtype=torch.uint8)),), 1, "of 2 axes"),
        ((piece(),), 2, "a bucket of version 2 in the transaction of 1"),
    ],
    ids=["duplicate", "extra", "extra part", "too long", "before", "dtype", "axes", "version"],
)
def test_a_piece_out_of_place_breaks_the_transaction(pieces, version, message):
    sampler = fresh(0)
    before = live_parts(sampler)
    sampler.begin(manifest_of(snapshot_of(1, 1)))
    with pytest.raises(SyncError, match=message) as caught:
        sampler.receive(Bucket(version=version, pieces=pieces))
    assert caught.value.condition == "C5"
    with pytest.raises(SyncError, match="after a failure"):
        sampler.receive(Bucket(version=1, pieces=()))
    with pytest.raises(SyncError, match="after a failure"):
        sampler.commit(1)
    sampler.abort()
    assert_same_bytes(live_parts(sampler), before)
    push(snapshot_of(1, 1), sampler)


def test_a_late_bucket_is_refused():
    sampler, snapshot = fresh(0), snapshot_of(1, 1)
    push(snapshot, sampler)
    with pytest.raises(SyncError, match="receive without begin") as caught:
        sampler.receive(next(buckets(snapshot)))
    assert caught.value.condition == "C5"


def test_a_manifest_must_fit_what_is_live():
    sampler = fresh(0)
    good = manifest_of(snapshot_of(1, 1))
    entries = good.entries
    as_fp8 = manifest_of(
        replace(snapshot_of(1, 1), tensors={"up": quantize(torch.ones(6, 64), QUANTIZERS["mxfp8_e5m2"])})
    )
    wider = manifest_of(replace(snapshot_of(1, 1), tensors={"up": quantize(torch.ones(6, 96), QUANTIZERS["mxfp8"])}))
    without = {name: entry for name, entry in entries.items() if name != "down"}
    for manifest, condition, tensors in (
        (replace(good, plan_digest="another"), "C1", ()),
        (replace(good, entries=entries | as_fp8.entries), "C1", ("up",)),
        (replace(good, entries=entries | wider.entries), "C5", ("up",)),
        (replace(good, entries=without), "C5", ("down",)),
        (replace(good, entries=entries | {"lm_head": entries["up"]}), "C5", ("lm_head",)),
    ):
        with pytest.raises(SyncError) as caught:
            sampler.begin(manifest)
        assert (caught.value.condition, caught.value.tensors) == (condition, tensors)
    assert sampler.version == 0
    answers(sampler)


def test_bytes_changed_on_the_way_are_found_and_named():
    sampler, snapshot = fresh(0), snapshot_of(1, 1)
    before = live_parts(sampler)
    sampler.begin(manifest_of(snapshot))
    for bucket in buckets(snapshot):
        data = [p.data.clone() if p.name == "row" and p.part == "scales" else p.data for p in bucket.pieces]
        for p, d in zip(bucket.pieces, data, strict=True):
            if d is not p.data:
                d[0] ^= 1
        sampler.receive(
            replace(bucket, pieces=tuple(replace(p, data=d) for p, d in zip(bucket.pieces, data, strict=True)))
        )
    with pytest.raises(SyncError, match="row") as caught:
        sampler.commit(1)
    assert (caught.value.condition, caught.value.tensors) == ("C2", ("row",))
    assert_same_bytes(live_parts(sampler), before)
    assert sampler.version == 0


@pytest.mark.parametrize(
    ("fault", "condition", "tensors"),
    [
        ("drop_piece", "C2", ("gate",)),
        ("stale_scales", "C2", ("gate", "up", "down", "row")),
        ("stale_operand", "C3", ("gate", "up", "down", "row", "norm")),
        ("ignore_commit", "C2", ("gate", "up", "down", "row", "norm")),
        ("flip_byte", "C2", ("norm",)),
    ],
)
def test_push_finds_a_sampler_that_does_not_check_itself(fault, condition, tensors):
    sampler = fresh(0, faults=[fault])
    before, expected = live_parts(sampler), answers(sampler)
    with pytest.raises(SyncError) as caught:
        push(snapshot_of(1, 1), sampler)
    assert (caught.value.condition, caught.value.tensors) == (condition, tensors)
    assert sampler.version == 0
    assert_same_bytes(live_parts(sampler), before)
    assert_same_bytes(answers(sampler), expected)


def test_new_storage_passes_the_digest_and_shows_in_the_captured_probe():
    sampler = fresh(0, faults=["new_storage"])
    stale = sampler.probe([[1]], captured=True)
    push(snapshot_of(1, 1), sampler)
    assert_same_bytes(sampler.probe([[1]], captured=True), stale)
    assert_same_bytes(sampler.probe([[1]]), fresh(1, 1).probe([[1]]))


def test_every_byte_shows_in_the_tokens_of_the_fake():
    before = fresh(0).probe([[0]])
    for key in parts_by_key(snapshot_of(0, 0).tensors):
        snapshot = snapshot_of(0, 0)
        raw_bytes(parts_by_key(snapshot.tensors)[key])[-1] ^= 1
        with pytest.raises(AssertionError):
            assert_same_bytes(FakeSampler(snapshot, version=0).probe([[0]]), before)


def test_a_commit_is_undone_only_before_it_served():
    sampler = fresh(0)
    expected = answers(sampler)
    push(snapshot_of(1, 1), sampler)
    sampler.abort()
    assert sampler.version == 0
    assert_same_bytes(answers(sampler), expected)
    push(snapshot_of(1, 1), sampler)
    served = answers(sampler)
    sampler.abort()
    assert sampler.version == 1
    assert_same_bytes(answers(sampler), served)


@pytest.mark.parametrize("answer", [{}, None, {"gate": 1}], ids=str)
def test_an_answer_that_is_not_understood_is_a_failure(answer):
    class Mute(FakeSampler):
        def digest(self, names):
            return answer

    sampler = Mute(snapshot_of(0, 0), version=0)
    with pytest.raises(SyncError) as caught:
        push(snapshot_of(1, 1), sampler)
    assert caught.value.condition == "C2"
    assert sampler.version == 0


def test_faults_are_known_by_name():
    with pytest.raises(AssertionError):
        fresh(0, faults=["typo"])
    assert len(FAULTS) == 8
