"""Snapshot and manifest: the weights of a version, and the table of contents that proves them."""

from __future__ import annotations

from collections.abc import Mapping

from onegrid.formats import digests
from onegrid.model.canonical import Canonical, Snapshot, dtype_name, format_of, parts_of
from onegrid.types import Entry, Manifest, Part


def manifest_of(snapshot: Snapshot) -> Manifest:
    """Names, formats, shapes, bytes and digests of a snapshot, read from the learner's own storage."""
    return Manifest(version=snapshot.version, plan_digest=snapshot.plan_digest, entries=entries_of(snapshot.tensors))


def entries_of(tensors: Mapping[str, Canonical]) -> dict[str, Entry]:
    """The lines of a manifest."""
    parts = {name: parts_of(canonical) for name, canonical in tensors.items()}
    values = iter(digests([(x, part) for named in parts.values() for part, x in named.items()]))
    return {
        name: Entry(
            shape=tuple(canonical.shape),
            format=format_of(canonical),
            parts={
                part: Part(dtype=dtype_name(x), shape=tuple(x.shape), num_bytes=x.nbytes, digest=next(values))
                for part, x in parts[name].items()
            },
        )
        for name, canonical in tensors.items()
    }


def entry_of(canonical: Canonical) -> Entry:
    """One line of a manifest."""
    return entries_of({"": canonical})[""]
