"""What kernels read on two sides: derived from the same codes, each by itself, it is the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    shared = {key for key, operand in mine.items() if key in theirs and _same(operand, theirs[key])}
    return [key for key in {**mine, **theirs} if key not in shared]


def _same(one: Operand, other: Operand) -> bool:
    if one.kind != other.kind:
        return False
    for x, y in ((one.values, other.values), (one.row, other.row), (one.block, other.block)):
        if x is None or y is None:
            if x is not y:
                return False
        elif (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) or not torch.equal(_words(x), _words(y)):
            return False
    return True


def _words(x: Tensor) -> Tensor:
    """Integers, since NaN is not equal to itself and -0 is equal to 0; wide ones, since they are compared faster."""
    x = x.contiguous().view(-1)
    whole = x.nbytes % 8 == 0 and x.storage_offset() * x.element_size() % 8 == 0
    return x.view(torch.int64 if whole else torch.uint8)


def canonical_parts(canonical: Canonical) -> Parts:
    """Codes, scales and amax, or values."""
    return [(x, part) for part, x in parts_of(canonical).items()]


def sums_of(sets: Sequence[Parts]) -> list[int]:
    """One digest for each set of parts; all are computed together."""
    values = iter(digests([part for parts in sets for part in parts]))
    return [sum(next(values) for _ in parts) & MASK for parts in sets]
