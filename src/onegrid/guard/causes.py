"""Likely causes: which known fault leaves bytes like these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onegrid.guard.locate import same_multiset
from onegrid.model.canonical import raw_bytes

OLD_ADDRESSES = "the update went into other storage than the one that serves: a graph or kernel holds old addresses"
OTHER_CACHE = "keys and values are cached in another format than the plan says"
TABLES = "a buffer that no checkpoint holds came back wrong: the table of the rotary embedding"
HEAD = "a head that was not made again: a tied copy of the embedding, of an older version"
NOT_MERGED = "adapters that were trained and not merged into the masters, or merged at another scale or version"
DERIVED = "something outside the digest was not made again, and no known place shows it"


def cause_of(
    name: str,
    expected: Mapping[str, Mapping[str, Tensor]],
    found: Mapping[str, Tensor],
    previous: Mapping[str, int] | None,
    digests: Mapping[str, int],
) -> str:
    """One sentence about tensor `name`.

    expected  parts of every tensor of the version, by name
    found     parts of `name` in the sampler
    previous  digests by "name part" of the version before, where known
    digests   digests by part of `found`
    """
    parts = expected[name]
    differing = [part for part, x in parts.items() if part not in found or not _same(x, found[part])]
    stale = [part for part in differing if previous and previous.get(f"{name} {part}") == digests.get(part)]
    if not differing:
        return "bytes that are right: another storage than the one that was asked"
    if stale and len(stale) == len(differing) == len(parts):
        return "the tensor of the version before: its update was skipped, or its name was not known to the loader"
    if stale == ["scales"]:
        return "new codes under the scales of the version before"
    if stale:
        return f"{', '.join(stale)} of the version before: they were not written"
    for part in differing:
        if part in found and found[part].numel():
            raw = raw_bytes(found[part].detach().contiguous())
            if bool((raw == 0).all()) or bool((raw == 255).all()):
                return f"{part} that were never written: all bytes are 0x{int(raw[0]):02x}"
    others = [n for n, theirs in expected.items() if n != name and _all_same(theirs, found)]
    if others:
        return f"the content of {others[0]}: the two have changed places"
    num_bytes = sum(_count(parts[part], found.get(part)) for part in differing)
    if num_bytes == 1:
        return f"one byte of its {differing[0]} was changed: memory or transport"
    if all(part in found and same_multiset(parts[part], found[part]) for part in differing):
        return "the right content in another order: a layout that keeps shape and dtype"
    if "amax" in differing:
        return "another global amax: taken per shard, or for gate and up apart"
    if "scales" in differing:
        return "another scale rule on the sampler's side, so another grid"
    return "other codes: the sampler's own rounding, or bytes changed on the way"


def _same(one: Tensor, other: Tensor) -> bool:
    return _count(one, other) == 0


def _all_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(_same(x, other[part]) for part, x in one.items())


def _count(one: Tensor, other: Tensor | None) -> int:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one.nbytes
    bytes_one, bytes_other = (raw_bytes(x.detach().contiguous()) for x in (one, other.to(one.device)))
    return int(torch.count_nonzero(bytes_one != bytes_other))
