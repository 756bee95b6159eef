"""Sequences to rows: micro-batches by tokens, block-aligned starts, and where each sequence lies for attention."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS
from onegrid.model.decoder import Attend, Rows
from onegrid.ops.packed_attention import Segments, segments_of
from onegrid.ops.pins import TILE, round_up
from onegrid.ops.table import PLAIN, Kernels
from onegrid.recipe import Plan
from onegrid.types import Sequence


def micro_batches(num_rows: Items[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of sequences by micro-batch: longest first, ties in given order, at most `max_tokens` rows each.

    num_rows  rows each sequence takes, alignment included. One that is longer than `max_tokens` goes alone.
    """
    order = sorted(range(len(num_rows)), key=lambda i: (-num_rows[i], i))
    out: list[list[int]] = []
    filled = 0
    for index in order:
        if not out or filled + num_rows[index] > max_tokens:
            out.append([])
            filled = 0
        out[-1].append(index)
        filled += num_rows[index]
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Sequences of one micro-batch as rows. The last token of each is only predicted, never read."""

    rows: Rows
    segments: Segments
    """Where each sequence lies."""
    predict_P: Tensor
    """int64: row whose hidden state predicts each response token, all sequences in order."""
    target_P: Tensor
    """int64: those response tokens."""
    apart_A: Tensor | None = None
    """int64: the row at each place of the column-wise operands, where every sequence begins a block of its own; one
    beyond the decoder's rows means none. None: rows begin blocks themselves."""


def pack(
    sequences: Items[Sequence],
    *,
    align: int,
    dense: bool = False,
    device: torch.device | str = "cpu",
    bucket: Callable[[int, int], int] | None = None,
) -> Packed:
    """Rows of `sequences`, each starting at a multiple of `align`, padding rows masked.

    align  1, or the block along tokens of a quantized backward pass (32; 128), so that no block spans two sequences
    dense  rows follow one another, and only the column-wise operands are aligned: `apart_A` says how
    bucket  (rows, align) -> rows to fill up to; None adds none
    """
    if dense and align > 1:
        packed = pack(sequences, align=1, device=device)
        return replace(packed, apart_A=_apart([len(s.tokens_T) - 1 for s in sequences], align).to(device))
    lengths = [len(s.tokens_T) - 1 for s in sequences]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + round_up(length, align))
    num_rows = starts[-1] if bucket is None else bucket(starts[-1], align)
    tokens, positions = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64)
    mask = torch.zeros(num_rows, dtype=torch.bool)
    predict, target = [], []
    for sequence, start, length in zip(sequences, starts, lengths, strict=False):
        at, arange = slice(start, start + length), torch.arange(length)
        tokens[at], positions[at], mask[at] = sequence.tokens_T[:-1].cpu(), arange, True
        predict.append(torch.arange(start + sequence.num_prompt - 1, start + length))
        target.append(sequence.tokens_T[sequence.num_prompt :].cpu())
    return Packed(
        rows=Rows(tokens_N=tokens.to(device), positions_N=positions.to(device), mask_N=mask.to(device)),
        segments=segments_of(starts[:-1], lengths, num_rows, device),
        predict_P=torch.cat(predict).to(device),
        target_P=torch.cat(target).to(device),
    )


def _apart(lengths: Items[int], align: int) -> Tensor:
    """Row of every place of sequences that begin at multiples of `align`; one beyond the decoder's rows: none."""
    none = max(TILE, round_up(sum(lengths), TILE))  # the decoder pads rows to this
    places, row, start = torch.full((round_up(sum(round_up(n, align) for n in lengths), TILE),), none), 0, 0
    for length in lengths:
        places[start : start + length] = torch.arange(row, row + length)
        row, start = row + length, start + round_up(length, align)
    return places


def attend_packed(segments: Segments, kernels: Kernels = PLAIN) -> Attend:
    """Attention of a packed micro-batch: every sequence sees its own keys from position 0."""

    def attend(layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        return kernels.packed_attention(q_NHD, k_NGD, v_NGD, segments)

    return attend


def alignment(plan: Plan) -> int:
    """Rows that a sequence's start must be a multiple of: the largest block along tokens of a quantized backward."""
    largest = 1
    for planned in plan.tensors.values():
        if planned.backward == "quantized":
            for name in (planned.activation, planned.gradient):
                along = None if name is None else QUANTIZERS[name].block[1]
                largest = max(largest, along or 1)
    return largest


def rows_are_alone(plan: Plan) -> bool:
    """Whether no scale of a row-wise operand spans rows, so that only column-wise operands need aligned sequences."""
    names = {name for planned in plan.tensors.values() for name in (planned.activation, planned.gradient) if name}
    return all(QUANTIZERS[name].block[0] in (None, 1) for name in names)
