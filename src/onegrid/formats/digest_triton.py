"""The digest of a large tensor in one pass on an NVIDIA GPU: the integers of `digest.weighted_sum`, at memory speed.

A program keeps one column of every chunk in registers: it adds up chunk weight times word over its chunks, and
multiplies by the word's own weight once, at the end. All sums are modulo 2^64, so any order gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onegrid.formats.digest import PAIRS, pair_weights

COLUMNS = 512
"""64-bit words of a program's column."""
CHUNKS = 64
"""Chunks of one program."""


@triton.jit
def _sums(data, weight, low, high, out, num_chunks, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, CHUNKS: tl.constexpr):
    """out[group, column] = sum of chunk weight times word weight times word, over CHUNKS chunks and COLUMNS words."""
    group, column = tl.program_id(0), tl.program_id(1)
    at = column * COLUMNS + tl.arange(0, COLUMNS)
    words = tl.zeros([COLUMNS], dtype=tl.int64)
    uppers = tl.zeros([COLUMNS], dtype=tl.int64)
    first = group * CHUNKS
    for i in range(CHUNKS):
        chunk = first + i
        there = chunk < num_chunks
        w = tl.load(weight + chunk, mask=there, other=0)
        x = tl.load(data + chunk.to(tl.int64) * PAIRS + at, mask=there & (at < PAIRS), other=0)
        words += x * w
        uppers += (x >> 32) * w
    total = tl.sum(words * tl.load(low + at) + uppers * tl.load(high + at), 0)
    tl.store(out + group * (PAIRS // COLUMNS) + column, total)


def triton_weighted_sum(data_CN: Tensor, weight_C: Tensor) -> Tensor:
    """See `digest.weighted_sum`: uint8 [C, CHUNK] at a multiple of 8 bytes, int64 [C]; int64 of shape ()."""
    num_chunks = len(data_CN)
    groups, columns = triton.cdiv(num_chunks, CHUNKS), PAIRS // COLUMNS
    out = torch.empty(groups * columns, dtype=torch.int64, device=data_CN.device)
    low, high = pair_weights(data_CN.device)
    _sums[groups, columns](
        data_CN.view(torch.int64),
        weight_C,
        low,
        high,
        out,
        num_chunks,
        COLUMNS=COLUMNS,
        PAIRS=PAIRS,
        CHUNKS=CHUNKS,
        num_warps=4,
    )
    return out.sum()
