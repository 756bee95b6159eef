"""`ops.draw` on NVIDIA GPUs: one kernel sums blocks, a second picks, instead of some sixty launches.

Uniform numbers have the definition's bytes: whole numbers of 64 bits and one exact product. Sums are FP64 in another
order than the definition's, so the promise is `bound`: another token only where the uniform number falls within some
1e-13 of a boundary.
"""

import triton
import triton.language as tl
from torch import Tensor, float64, int8, int64
from torch import bool as bool_
from triton.language.extra import libdevice

from onegrid.ops.draw import BLOCK, MIX, WEYL
from onegrid.ops.early import begin, options

_TOGETHER = 8
"""Blocks of one program."""
_STEP, _SHIFT_1, _TIMES_1, _SHIFT_2, _TIMES_2 = map(tl.constexpr, (WEYL, *MIX[0], *MIX[1]))


@triton.jit
def _sums(logp, sums, finite, width, num_blocks, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logp + row * width + at, mask=at < width, other=float("-inf"))
    p = libdevice.exp(x).to(tl.float64)
    bad = tl.where(at < width, tl.where(tl.abs(x) < float("inf"), 0, 1), 0)
    inside = block < num_blocks
    tl.store(sums + row * num_blocks + block, tl.sum(p, 1), mask=inside)
    tl.store(finite + row * num_blocks + block, (1 - tl.max(bad, 1)).to(tl.int8), mask=inside)


@triton.jit
def uniform(stream, position):
    """`ops.draw.uniform` of int64 numbers."""
    x = stream.to(tl.uint64) + (position + 1).to(tl.uint64) * _STEP
    x = (x ^ (x >> _SHIFT_1)) * _TIMES_1
    x = (x ^ (x >> _SHIFT_2)) * _TIMES_2
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def _pick(
    logp, stream, position, sums, finite, token, token_logp, all_finite, width, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    there = b < num_blocks
    cdf = tl.cumsum(tl.load(sums + row * num_blocks + b, mask=there, other=0.0), 0)
    good = tl.min(tl.load(finite + row * num_blocks + b, mask=there, other=1).to(tl.int32), 0)
    threshold = uniform(tl.load(stream + row), tl.load(position + row)) * tl.max(cdf, 0)
    block = tl.minimum(tl.sum((there & (cdf <= threshold)).to(tl.int32), 0), num_blocks - 1)
    before = tl.max(tl.where(b < block, cdf, 0.0), 0)
    k = tl.arange(0, BLOCK)
    at = block * BLOCK + k
    x = tl.load(logp + row * width + at, mask=at < width, other=float("-inf"))
    p = libdevice.exp(x).to(tl.float64)
    inner = before + tl.cumsum(p, 0)
    place = tl.sum((inner <= threshold).to(tl.int32), 0)
    last = tl.max(tl.where(p > 0, k, 0), 0)
    chosen = tl.minimum(block * BLOCK + tl.minimum(place, last), width - 1)
    tl.store(token + row, chosen.to(tl.int64))
    tl.store(token_logp + row, tl.load(logp + row * width + chosen))
    tl.store(all_finite + row, good.to(tl.int8))


def draw(logp_NV: Tensor, stream_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token int64, its log-probability FP32, and whether the row is finite: all [N]."""
    assert stream_N.is_contiguous() and position_N.is_contiguous()
    logp_NV = logp_NV.contiguous()
    num_rows, width = logp_NV.shape
    num_blocks = triton.cdiv(width, BLOCK)
    sums = logp_NV.new_empty(num_rows, num_blocks, dtype=float64)
    finite = logp_NV.new_empty(num_rows, num_blocks, dtype=int8)
    token, token_logp = logp_NV.new_empty(num_rows, dtype=int64), logp_NV.new_empty(num_rows)
    all_finite = logp_NV.new_empty(num_rows, dtype=int8)
    if num_rows:
        _sums[(triton.cdiv(num_blocks, _TOGETHER), num_rows)](
            logp_NV, sums, finite, width, num_blocks, BLOCK=BLOCK, TOGETHER=_TOGETHER, num_warps=8,
            **options(logp_NV.device),
        )  # fmt: skip
        _pick[(num_rows,)](
            logp_NV, stream_N, position_N, sums, finite, token, token_logp, all_finite, width, num_blocks,
            BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4,
            **options(logp_NV.device),
        )  # fmt: skip
    return token, token_logp, all_finite.view(bool_)
