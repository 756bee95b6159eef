"""Digest check (C2, C3): every tensor, from the storage that the sampler's kernels read, against the learner's bytes.

Canonical bytes have the manifest's digests. What is derived of them has those of its receipt (`model.receipts`), and
where both sides derive in one layout, the learner's too: two derivations that know nothing of each other. Some are
derived again in turns. A tensor that differs is named down to row and block where the sampler lets its bytes be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from onegrid.errors import CapabilityError, SyncError
from onegrid.formats import digest
from onegrid.guard.causes import cause_of
from onegrid.guard.locate import first_difference
from onegrid.guard.turns import due
from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed, shorten
from onegrid.model.canonical import Snapshot, parts_of
from onegrid.model.receipts import Receipt
from onegrid.sampler.base import Sampler
from onegrid.sampler.intake import expected_digests
from onegrid.types import Manifest

CHECK, CONDITION = "digest", "C2"
LOOKED_AT = 4
"""Tensors that are located; the others are only named."""


def compare_digests(
    manifest: Manifest,
    sampler: Sampler,
    snapshot: Snapshot,
    *,
    previous: Manifest | None = None,
    receipts: Mapping[str, Receipt] | None = None,
    per_sync: int = 1,
) -> Verdict:
    """The learner's digests against the sampler's, all tensors.

    previous  helps to tell a stale tensor
    receipts  of the learner's own derivations
    per_sync  how many are derived again in any case
    """
    return closed(CHECK, CONDITION, lambda: _compare(manifest, sampler, snapshot, previous, receipts or {}, per_sync))


def _compare(
    manifest: Manifest,
    sampler: Sampler,
    snapshot: Snapshot,
    previous: Manifest | None,
    receipts: Mapping[str, Receipt],
    per_sync: int,
) -> Verdict:
    expected = expected_digests(manifest)
    try:
        found = sampler.digest(expected)
        _compare_derived(sampler, receipts, version=manifest.version, per_sync=per_sync)
    except SyncError as error:
        cause = _STALE if error.condition == "C3" else ""
        return failed(
            CHECK,
            error.condition,
            tensors=error.tensors,
            expected="operands that follow from the codes and scales of this version",
            found=str(error),
            cause=cause,
        )
    if not isinstance(found, Mapping) or not expected:
        return could_not_tell(CHECK, CONDITION, expected=f"{len(expected)} digests", found=repr(found)[:200])
    wrong = [name for name, value in expected.items() if found.get(name) != value]
    if not wrong:
        return passed(CHECK, CONDITION, found=f"{len(expected)} tensors")
    return differing(wrong, sampler, snapshot, previous=previous)


def _compare_derived(sampler: Sampler, receipts: Mapping[str, Receipt], *, version: int, per_sync: int) -> None:
    """SyncError C3 where the two sides derived different bytes, or a second derivation gives others than the first."""
    derived = getattr(sampler, "derived", None)
    if derived is None:
        return
    theirs: Mapping[str, Receipt] = derived()
    apart = [
        key
        for key, mine in receipts.items()
        if key in theirs and theirs[key].layout == mine.layout and theirs[key].product != mine.product
        if theirs[key].source == mine.source
    ]
    sampler.rederive([*apart, *due(list(theirs), version=version, per_sync=per_sync)])  # type: ignore[attr-defined]
    if apart:
        raise SyncError(
            f"learner and sampler derived different operands of the same codes: {shorten(apart)}",
            condition="C3",
            tensors=tuple(apart),
        )


def differing(
    wrong: Iterable[str], sampler: Sampler, snapshot: Snapshot, *, previous: Manifest | None = None
) -> Verdict:
    """The verdict on tensors whose digests are known to differ, with first rows and blocks."""
    wrong = list(wrong)
    where: list[str] = []
    cause = ""
    for name in wrong[:LOOKED_AT]:
        parts = _stored(sampler, name)
        if parts is None or name not in snapshot.tensors:
            continue
        canonical = snapshot.tensors[name]
        found = first_difference(canonical, parts_of(canonical), parts)
        where.append(f"{name}: {found if found is not None else 'the bytes that it shows are right'}")
        if not cause:
            expected = {n: parts_of(tensor) for n, tensor in snapshot.tensors.items()}
            digests = {part: digest(x, role=part) for part, x in parts.items()}
            cause = cause_of(name, expected, parts, _by_part(previous), digests)
    return failed(
        CHECK,
        CONDITION,
        tensors=wrong,
        expected="the bytes that the learner published",
        found=f"{len(wrong)} of {len(snapshot.tensors)} tensors differ: {shorten(wrong)}",
        where=where,
        cause=cause or "bytes that were changed, or another quantizer, on the sampler's side",
    )


def _stored(sampler: Sampler, name: str) -> Mapping[str, Tensor] | None:
    read = getattr(sampler, "stored", None)
    try:
        return None if read is None else read(name)
    except (CapabilityError, SyncError):
        return None


def _by_part(manifest: Manifest | None) -> dict[str, int] | None:
    if manifest is None:
        return None
    return {f"{n} {part}": x.digest for n, entry in manifest.entries.items() for part, x in entry.parts.items()}


_STALE = "derived state of an older version: a layout, swizzle or repacked copy that the update did not make again"
