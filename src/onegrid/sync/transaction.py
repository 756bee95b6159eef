"""One synchronization from begin to proof: the new version serves whole, or the old one goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.model.canonical import Snapshot
from onegrid.sampler.base import Sampler
from onegrid.sampler.intake import expected_digests
from onegrid.sync.snapshot import manifest_of
from onegrid.sync.transport import DEFAULT_BUCKET_BYTES, buckets
from onegrid.types import Manifest

_LOWER = (
    "what arrives is put aside until it is proved, so memory must hold the codes once more: lower sampler.max_slots, "
    "sampler.max_len or guard.bucket_bytes"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What a synchronization moved. Metric keys `sync/...`."""

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    num_buckets: int
    codes_changed_share: float | None
    """Share of stored elements (codes, or values of tensors that are not quantized) that differ from the version
    before; None for a first version or where the sampler cannot tell."""
    manifest: Manifest


def push(
    snapshot: Snapshot,
    sampler: Sampler,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    order: int | None = None,
    prove: Callable[[Manifest, Sampler], None] | None = None,
) -> SyncReport:
    """Makes `snapshot` the version that `sampler` serves, proved from both sides.

    bucket_bytes, order  see `transport.buckets`
    prove                what must not raise after the commit; None compares every tensor's digest
    Raises SyncError with the broken condition and the tensors concerned; the sampler was then told to abort and serves
    the version before. An interruption aborts too and goes on upwards.
    """
    began = time.perf_counter()
    manifest = manifest_of(snapshot)
    num_buckets = 0
    try:
        sampler.begin(manifest)
        for bucket in buckets(snapshot, bucket_bytes, order=order):
            sampler.receive(bucket)
            num_buckets += 1
        share = sampler.commit(manifest.version)
        (prove or compare_digests)(manifest, sampler)
    except BaseException as error:
        _abort(sampler, error)
        if isinstance(error, SyncError) or not isinstance(error, Exception):
            raise
        lower = f"; {_LOWER}" if isinstance(error, torch.OutOfMemoryError | MemoryError) else ""
        raise SyncError(
            f"synchronization to version {manifest.version} failed: {type(error).__name__}: {error}{lower}",
            condition="C5",
            tensors=error.tensors if isinstance(error, CapabilityError) else (),
        ) from error
    return SyncReport(
        version=manifest.version,
        seconds=time.perf_counter() - began,
        num_bytes=sum(part.num_bytes for entry in manifest.entries.values() for part in entry.parts.values()),
        num_tensors=len(manifest.entries),
        num_buckets=num_buckets,
        codes_changed_share=share,
        manifest=manifest,
    )


def compare_digests(manifest: Manifest, sampler: Sampler) -> None:
    """The learner's digests against the sampler's answer; whatever is not an equal number is a failure."""
    expected = expected_digests(manifest)
    found = sampler.digest(expected)
    if not isinstance(found, Mapping):
        raise SyncError(f"the sampler's digest is no answer: {found!r}", condition="C2", tensors=tuple(expected))
    wrong = tuple(name for name, value in expected.items() if found.get(name) != value)
    if wrong:
        listed = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise SyncError(
            f"{len(wrong)} of {len(expected)} tensors differ between learner and sampler: {listed}",
            condition="C2",
            tensors=wrong,
        )
    if sampler.version != manifest.version:
        raise SyncError(f"committed {manifest.version}, but {sampler.version} is serving", condition="C7")


def _abort(sampler: Sampler, error: BaseException) -> None:
    try:
        sampler.abort()
    except Exception as second:
        error.add_note(f"and the sampler could not abort: {type(second).__name__}: {second}")
