"""Buckets hold every byte once, whatever their size and order."""

from __future__ import annotations

import pytest
import torch

from onegrid.errors import ConfigError
from onegrid.model.canonical import raw_bytes
from onegrid.sampler.coverage import Coverage
from onegrid.sync import buckets, manifest_of
from tests.bytes import assert_same_bytes
from tests.sync.toy import parts_by_key, snapshot_of


@pytest.mark.parametrize("bucket_bytes", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("order", [None, 3])
def test_buckets_hold_every_byte_once(bucket_bytes, order):
    snapshot = snapshot_of(0, version=4)
    parts = parts_by_key(snapshot.tensors)
    rebuilt = {key: torch.zeros(x.nbytes, dtype=torch.uint8) for key, x in parts.items()}
    coverage = {key: Coverage(x.nbytes) for key, x in parts.items()}
    sizes = []
    for bucket in buckets(snapshot, bucket_bytes, order=order):
        assert bucket.version == 4
        sizes.append(sum(len(piece.data) for piece in bucket.pieces))
        for piece in bucket.pieces:
            end = piece.offset + len(piece.data)
            assert coverage[piece.name, piece.part].add(piece.offset, end)
            rebuilt[piece.name, piece.part][piece.offset : end] = piece.data
    assert all(c.complete for c in coverage.values())
    assert_same_bytes(list(rebuilt.values()), [raw_bytes(x) for x in parts.values()])
    total = sum(x.nbytes for x in parts.values())
    assert sorted(sizes) == sorted(
        [bucket_bytes] * (total // bucket_bytes) + [total % bucket_bytes] * (total % bucket_bytes > 0)
    )


def test_an_order_is_a_function_of_its_seed():
    def listed(order):
        return [(p.name, p.part, p.offset) for b in buckets(snapshot_of(0, 1), 50, order=order) for p in b.pieces]

    assert listed(1) == listed(1)
    assert listed(1) != listed(2)


def test_a_bucket_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        next(buckets(snapshot_of(0, 1), 0))


def test_a_manifest_names_every_part_with_its_bytes():
    manifest = manifest_of(snapshot_of(0, version=2))
    assert manifest.version == 2
    gate, down = manifest.entries["gate"], manifest.entries["down"]
    assert (gate.format, gate.shape, set(gate.parts)) == ("mxfp8", (6, 64), {"codes", "scales"})
    assert (down.format, down.shape, set(down.parts)) == ("nvfp4", (5, 32), {"codes", "scales", "amax"})
    assert down.parts["codes"].num_bytes == 5 * 16
    assert manifest.entries["norm"].format == "bf16"
    assert manifest.entries["norm"].parts["values"].num_bytes == 14


def test_coverage_knows_every_overlap():
    for first in range(6):
        for last in range(first + 1, 7):
            coverage = Coverage(10)
            assert coverage.add(2, 4)
            overlaps = first < 4 and last > 2
            assert coverage.add(first, last) is not overlaps
            assert coverage.missing_bytes == 8 - (0 if overlaps else last - first)


def test_coverage_joins_runs_in_any_order():
    generator = torch.Generator().manual_seed(0)
    coverage = Coverage(64)
    for at in torch.randperm(64, generator=generator).tolist():
        assert not coverage.complete
        assert coverage.add(at, at + 1)
        assert not coverage.add(at, at + 1)
    assert coverage.complete
