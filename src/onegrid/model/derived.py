"""What kernels read on two sides: derived from the same codes, each by itself, it is the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onegrid.formats import digests
from onegrid.formats.digest import MASK
from onegrid.model.canonical import Canonical, parts_of
from onegrid.ops.operand import Operand

Parts = Sequence[tuple[Tensor, str]]
"""Tensors with their roles in a digest."""


def in_doubt(mine: Mapping[str, Operand], theirs: Mapping[str, Operand]) -> list[str]:
    """Keys of which the other side does not hold the same bytes in the same layout: the two prove nothing there."""
    alike = {key: pairs for key in mine if key in theirs and (pairs := _pairs(mine[key], theirs[key])) is not None}
    wrong = set(unequal(alike.items()))
    return [key for key in {**mine, **theirs} if key not in alike or key in wrong]


def _pairs(one: Operand, other: Operand) -> list[tuple[Tensor, Tensor]] | None:
    """Tensors to compare; None where layouts differ already."""
    if one.kind != other.kind:
        return None
    both = [(one.values, other.values), (one.row, other.row), (one.block, other.block)]
    if any((x is None) != (y is None) for x, y in both):
        return None
    return [(x, y) for x, y in both if x is not None and y is not None]


def unequal(pairs: Iterable[tuple[str, Sequence[tuple[Tensor, Tensor]]]]) -> list[str]:
    """Names with a pair that differs in any byte, in shape, dtype or device, in the order given.

    A GPU is waited for once, after the last pair, and not once a tensor. Pairs may be made one after another: none is
    kept.
    """
    names: list[str] = []
    wrong: set[str] = set()
    waiting: list[tuple[str, Tensor]] = []
    for name, each in pairs:
        names.append(name)
        for x, y in each:
            if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
                wrong.add(name)
                continue
            x, y = _words(x, y)
            if x.device.type != "cpu":
                waiting.append((name, (x != y).any()))
            elif not torch.equal(x, y):
                wrong.add(name)
    if waiting:
        found = torch.stack([flag for _, flag in waiting]).tolist()
        wrong |= {name for (name, _), differs in zip(waiting, found, strict=True) if differs}
    return [name for name in names if name in wrong]


def _words(*tensors: Tensor) -> list[Tensor]:
    """Integers, since NaN is not equal to itself and -0 is equal to 0; wide ones, since they are compared faster."""
    flat = [x.contiguous().view(-1) for x in tensors]
    whole = all(x.nbytes % 8 == 0 and x.storage_offset() * x.element_size() % 8 == 0 for x in flat)
    return [x.view(torch.int64 if whole else torch.uint8) for x in flat]


def canonical_parts(canonical: Canonical) -> Parts:
    """Codes, scales and amax, or values."""
    return [(x, part) for part, x in parts_of(canonical).items()]


def sums_of(sets: Sequence[Parts]) -> list[int]:
    """One digest for each set of parts; all are computed together."""
    values = iter(digests([part for parts in sets for part in parts]))
    return [sum(next(values) for _ in parts) & MASK for parts in sets]
