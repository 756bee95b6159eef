"""What was made of what, as digests taken while it was made: a later look at storage is one pass, not a second making.

A receipt says which bytes a product was made from and which bytes came out. Storage that still has both digests holds
what was made; where one differs, the product is made again and compared byte for byte, so that a receipt never passes
what a comparison would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onegrid.formats import digests
from onegrid.formats.digest import MASK
from onegrid.model.canonical import Canonical, parts_of
from onegrid.ops.operand import Operand

Parts = Sequence[tuple[Tensor, str]]
"""Tensors with their roles in a digest."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One making."""

    source: int
    """Digest of what it was made from."""
    product: int
    """Digest of what came out, before it was stored."""
    layout: str
    """Of the product: products of one source in one layout are equal on both sides."""


def receipts_of(made: Iterable[tuple[str, Parts, Parts]]) -> dict[str, Receipt]:
    """made  (key, source, product) of every making."""
    made = list(made)
    sums = iter(sums_of([parts for _, source, product in made for parts in (source, product)]))
    return {key: Receipt(next(sums), next(sums), layout_of(product)) for key, _, product in made}


def canonical_parts(canonical: Canonical) -> Parts:
    """Codes, scales and amax, or values."""
    return [(x, part) for part, x in parts_of(canonical).items()]


def operand_parts(operand: Operand) -> Parts:
    """Values and factors."""
    named = ((operand.values, "values"), (operand.row, "amax"), (operand.block, "scales"))
    return [(x, role) for x, role in named if x is not None]


def layout_of(parts: Parts) -> str:
    """Shapes and dtypes, and the kind of device that the bytes are made on."""
    return "; ".join(f"{role} {tuple(x.shape)} {x.dtype} {x.device.type}" for x, role in parts)


def sums_of(sets: Sequence[Parts]) -> list[int]:
    """One digest for each set of parts; all are computed together."""
    values = iter(digests([part for parts in sets for part in parts]))
    return [sum(next(values) for _ in parts) & MASK for parts in sets]
