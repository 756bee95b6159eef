"""Snapshot and manifest: the weights of a version, and the table of contents that proves them."""

from __future__ import annotations

from onegrid.formats import digest
from onegrid.model.canonical import Canonical, Snapshot, dtype_name, format_of, parts_of
from onegrid.types import Entry, Manifest, Part


def manifest_of(snapshot: Snapshot) -> Manifest:
    """Names, formats, shapes, bytes and digests of a snapshot, read from the learner's own storage."""
    entries = {name: entry_of(canonical) for name, canonical in snapshot.tensors.items()}
    return Manifest(version=snapshot.version, plan_digest=snapshot.plan_digest, entries=entries)


def entry_of(canonical: Canonical) -> Entry:
    """One line of a manifest."""
    parts = {
        part: Part(dtype=dtype_name(x), shape=tuple(x.shape), num_bytes=x.nbytes, digest=digest(x, role=part))
        for part, x in parts_of(canonical).items()
    }
    return Entry(shape=tuple(canonical.shape), format=format_of(canonical), parts=parts)
