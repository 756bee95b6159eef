"""Digest check (C2, C3): every tensor, from the storage that the sampler's kernels read, against the learner's bytes.

Canonical bytes have the manifest's digests. What is derived of them is the same bytes as the learner's, where both
sides derive in one layout: two derivations that know nothing of each other. Anything else, and some in turns, is
derived again. A sampler that keeps nothing derived has nothing that could be stale: matmuls read the canonical bytes,
whose addresses the storage check compares, and the other side's operands are all derived again. A tensor that differs
is named down to row and block where the sampler lets its bytes be read.
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
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot, parts_of
from onegrid.model.derived import in_doubt
from onegrid.model.stacks import stack_key
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
    doubted: Iterable[str] | None = None,
    per_sync: int = 1,
) -> Verdict:
    """The learner's digests against the sampler's, all tensors.

    previous  helps to tell a stale tensor
    doubted   storage keys whose operands are not the learner's bytes; None: nobody compared
    per_sync  how many are derived again in any case
    """
    return closed(CHECK, CONDITION, lambda: _compare(manifest, sampler, snapshot, previous, doubted, per_sync))


def _compare(
    manifest: Manifest,
    sampler: Sampler,
    snapshot: Snapshot,
    previous: Manifest | None,
    doubted: Iterable[str] | None,
    per_sync: int,
) -> Verdict:
    expected = expected_digests(manifest)
    try:
        if doubted is None:
            found = sampler.digest(expected)
        else:
            found = sampler.canonical_digests(expected)  # type: ignore[attr-defined]
            turn = due(list(dict.fromkeys(map(stack_key, expected))), version=manifest.version, per_sync=per_sync)
            sampler.rederive(dict.fromkeys([*doubted, *turn]))  # type: ignore[attr-defined]
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
        bare = "" if doubted is None or sampler.operands() else ", nothing derived of them is kept"  # type: ignore[attr-defined]
        return passed(CHECK, CONDITION, found=f"{len(expected)} tensors{bare}")
    return differing(wrong, sampler, snapshot, previous=previous)


def doubts(learner: Learner, sampler: Sampler) -> list[str] | None:
    """Storage keys whose operands, in the storage that kernels read, are not the same bytes on both sides.

    None where the sampler cannot show its operands to this process, or they are not understood.
    """
    try:
        return in_doubt(learner.live.operands, sampler.operands())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, CapabilityError):
        return None


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
