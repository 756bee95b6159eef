"""Where two versions of a tensor differ: the first row and block, both bytes and both values.

Rows are found by their digests, so that a sampler far away need only send numbers until one row is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.formats import QuantTensor, dequantize
from onegrid.formats.digest import digest_rows
from onegrid.model.canonical import Canonical, raw_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first element that differs."""

    part: str
    """ "codes", "scales", "amax" or "values"."""
    row: int
    """Of the part's last axis."""
    block: int | None
    """Block of the row, None where the part has none."""
    column: int
    """First element of the tensor that the byte belongs to."""
    byte_expected: int
    byte_found: int
    """-1 where the part is not there in the expected shape."""
    value_expected: float
    value_found: float
    num_bytes: int
    """How many bytes differ, over all parts."""

    def __str__(self) -> str:
        if self.byte_found < 0:
            return f"{self.part} are not there in this shape and dtype"
        at = f"row {self.row}" + ("" if self.block is None else f", block {self.block}") + f", column {self.column}"
        return (
            f"{self.part}, {at}: byte 0x{self.byte_found:02x} ({self.value_found:.6g}), expected "
            f"0x{self.byte_expected:02x} ({self.value_expected:.6g}); {self.num_bytes} bytes differ"
        )


def first_difference(
    template: Canonical, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Difference | None:
    """Compares two sets of parts of one tensor; None where all bytes are equal.

    template  a canonical tensor of the same shape and format, for what the bytes mean
    Parts that are not there on both sides, in one shape, count as wholly different at their first byte.
    """
    count = sum(_num_different(x, found.get(part)) for part, x in expected.items())
    for part, want in expected.items():
        have = found.get(part)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            return _at(template, expected, {}, part, row=0, index=0, count=max(1, count))
        want, have = want.detach().cpu(), have.detach().cpu()
        rows = zip(digest_rows(want, role=part), digest_rows(have, role=part), strict=True)
        for row, (one, other) in enumerate(rows):
            if one == other:
                continue
            width = (want.shape[-1] if want.dim() else 1) * want.element_size()
            span = slice(row * width, (row + 1) * width)
            bytes_differ = raw_bytes(want.contiguous())[span] != raw_bytes(have.contiguous())[span]
            index = int(bytes_differ.nonzero()[0, 0])
            return _at(template, expected, dict(found), part, row=row, index=index, count=count)
    return None


def _num_different(want: Tensor, have: Tensor | None) -> int:
    if have is None or have.shape != want.shape or have.dtype != want.dtype:
        return want.nbytes
    have = have.detach().to(want.device)
    return int((raw_bytes(want.detach().contiguous()) != raw_bytes(have.contiguous())).sum())


def _at(
    template: Canonical,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    part: str,
    *,
    row: int,
    index: int,
    count: int,
) -> Difference:
    """index counts bytes inside the row."""
    byte = row * (expected[part].shape[-1] if expected[part].dim() else 1) * expected[part].element_size() + index
    bytes_expected, bytes_found = (
        int(raw_bytes(side[part].detach().cpu().contiguous())[byte]) if part in side else -1
        for side in (expected, found)
    )
    element, block = _element(template, part, row, index // expected[part].element_size())
    return Difference(
        part=part,
        row=row,
        block=block,
        column=element[-1] if element else 0,
        byte_expected=bytes_expected,
        byte_found=bytes_found,
        value_expected=_value(template, expected, element),
        value_found=_value(template, found, element),
        num_bytes=count,
    )


def _element(template: Canonical, part: str, row: int, at: int) -> tuple[tuple[int, ...], int | None]:
    """Index of the first element that place `at` of a part's row belongs to, and the number of its block."""
    shape = tuple(template.shape)
    if not isinstance(template, QuantTensor):
        return ((row, at) if len(shape) == 2 else (at,) if shape else ()), None
    across, along = template.quantizer.block
    if part == "codes":
        column = at * 2 if template.quantizer.fmt.bits == 4 else at
        return (row, column), None if along is None else column // along
    if part == "scales" and template.scales.dim() == 2:
        return (row * (across or 1), at * (along or 1) if along else 0), at if along else None
    return (at if template.quantizer.span == "row" else 0, 0), None


def _value(template: Canonical, parts: Mapping[str, Tensor], element: tuple[int, ...]) -> float:
    if not parts:
        return float("nan")
    if not isinstance(template, QuantTensor):
        return float(parts["values"].detach().cpu()[element])
    q = dataclasses.replace(
        template,
        codes=parts["codes"].detach().cpu(),
        scales=parts["scales"].detach().cpu(),
        amax=None if parts.get("amax") is None else parts["amax"].detach().cpu(),
        factor=None,
    )
    return float(dequantize(q)[tuple(min(i, n - 1) for i, n in zip(element, q.shape, strict=True))])


def same_multiset(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes in some order."""
    count = [torch.bincount(raw_bytes(x.detach().contiguous()).long(), minlength=256) for x in (one, other)]
    return one.shape == other.shape and torch.equal(count[0].cpu(), count[1].cpu())
