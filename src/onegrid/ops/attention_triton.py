"""Attention on NVIDIA GPUs: the fold over chunks of keys, split over multiprocessors in decode, with prefill's bytes.

The keys of a sequence are cut into chunks of CHUNK from position 0. A chunk's state (largest score, weight, weighted
values) starts empty and walks tiles of TILE keys; states are merged in chunk order. Prefill folds chunks one after
another in registers, decode computes them side by side and merges them afterwards: the same operations on the same
numbers, so the same bytes. What pins them: sums over keys and over the width go through the matrix unit (whose order
does not depend on the tile's rows), weights are summed by it too (a column of ones), the rest is a largest value or
one of an element alone, and every multiply-add that matters is written as one. Chunks and tiles beyond a query
multiply by 1 and add 0.

Weights are rounded to BF16 before they meet the values, numerator and denominator alike, so with |v| <= V a result is
within 2^-8 V of exact before its own rounding (half an ulp each of numerator and denominator), plus FP32 noise.
Source of the fold: Milakov and Gimelshein, arXiv 1805.02867; of the split: Dao et al., Flash-Decoding (2023).
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from onegrid.errors import CapabilityError
from onegrid.ops.early import begin, options
from onegrid.ops.pins import GPU_CHUNK

CHUNK = GPU_CHUNK
"""Keys whose state is computed on its own."""

TILE = 64
"""Keys of one matrix product."""

WIDTHS = (16, 32, 64, 128, 256)
"""Head widths that the kernels cover."""

MULTIPROCESSORS = 132
"""Of an H100 or H200. How work is cut follows it, and no byte does."""

FEW_CHUNKS = 4
"""Most chunks that a sequence may have for one program to walk them all."""

LOG2_E = 1.4426950408889634
_EMPTY = tl.constexpr(float("-inf"))


@triton.jit
def _chunk(
    q_MD, k, v, stride_k, stride_v, first, last, position_M, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """State of keys first .. last - 1 for ROWS queries: largest score (times log2 e), weight, weighted values."""
    largest = tl.full([ROWS], _EMPTY, tl.float32)
    weight = tl.zeros([ROWS, 16], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    ones = tl.full([TILE, 16], 1.0, tl.bfloat16)
    d = tl.arange(0, WIDTH)
    for start in range(first, last, TILE):
        key = start + tl.arange(0, TILE)
        at = key.to(tl.int64)
        k_DK = tl.load(k + at[None, :] * stride_k + d[:, None], mask=(key < last)[None, :], other=0.0)
        score = tl.dot(q_MD, k_DK)
        score = tl.where(key[None, :] <= position_M[:, None], score, _EMPTY)
        new = tl.maximum(largest, tl.max(score, 1) * scale)
        base = tl.where(new == _EMPTY, 0.0, new)
        scales = tl.full([ROWS, TILE], 1.0, tl.float32) * scale
        p = tl.exp2(tl.fma(score, scales, tl.broadcast_to(-base[:, None], [ROWS, TILE]))).to(tl.bfloat16)
        keep = tl.exp2(largest - base)
        v_KD = tl.load(v + at[:, None] * stride_v + d[None, :], mask=(key < last)[:, None], other=0.0)
        weight = tl.dot(p, ones, weight * keep[:, None])
        total = tl.dot(p, v_KD, total * keep[:, None])
        largest = new
    return largest, tl.max(weight, 1), total


@triton.jit
def _merge(largest, weight, total, chunk_largest, chunk_weight, chunk_total):
    """The fold's step: a chunk's state onto the state of all keys before it. Vectors [M], totals [M, D]."""
    new = tl.maximum(largest, chunk_largest)
    base = tl.where(new == _EMPTY, 0.0, new)
    keep, part = tl.exp2(largest - base), tl.exp2(chunk_largest - base)
    weight = tl.fma(weight, keep, chunk_weight * part)
    total = tl.fma(total, tl.broadcast_to(keep[:, None], total.shape), chunk_total * part[:, None])
    return new, weight, total


@triton.jit
def _finish(weight, total):
    """Rounded once to BF16; adding zero makes a negative zero positive, wherever it came from."""
    return (tl.div_rn(total, tl.broadcast_to(weight[:, None], total.shape)) + 0.0).to(tl.bfloat16)


@triton.jit
def _prefill(
    q, k, v, out, lse, first_B, length_B, stride_q, stride_k, stride_v, scale, num_heads,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    group, b = tl.program_id(1), tl.program_id(2)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest work first
    length = tl.load(length_B + b).to(tl.int32)
    if row0 >= length * REPEAT:
        return
    first = tl.load(first_B + b).to(tl.int64)
    row = row0 + tl.arange(0, ROWS)
    position, head = row // REPEAT, group * REPEAT + row % REPEAT
    d = tl.arange(0, WIDTH)
    inside = position < length
    at = (first + position)[:, None] * stride_q + (head * WIDTH)[:, None] + d[None, :]
    q_MD = tl.load(q + at, mask=inside[:, None], other=0.0)
    last = tl.minimum(length, (row0 + ROWS - 1) // REPEAT + 1)
    largest = tl.full([ROWS], _EMPTY, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    k_at, v_at = k + first * stride_k + group * WIDTH, v + first * stride_v + group * WIDTH
    for start in range(0, last, CHUNK):
        end = tl.minimum(start + CHUNK, last)
        part_largest, part_weight, part_total = _chunk(
            q_MD, k_at, v_at, stride_k, stride_v, start, end, position, scale, ROWS, WIDTH, TILE
        )
        largest, weight, total = _merge(largest, weight, total, part_largest, part_weight, part_total)
    out_at = ((first + position) * num_heads + head)[:, None] * WIDTH + d[None, :]
    tl.store(out + out_at, _finish(weight, total), mask=inside[:, None])
    tl.store(lse + (first + position) * num_heads + head, largest + tl.log2(weight), mask=inside)


@triton.jit
def _decode(
    q, k, v, k_new, v_new, part_largest, part_weight, part_total, out, position_B,
    stride_q, stride_k_new, stride_v_new, stride_kb, stride_kg, stride_ks, stride_vb, stride_vg, stride_vs, scale,
    num_heads, max_chunks,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    NEW: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """NEW: the last key and value are still to be written to the cache; whoever reads them does it.
    WHOLE: this walks all chunks and finishes as prefill does; else states are merged by `_decode_merge`."""
    begin(EARLY)
    group, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_at, v_at = k + b * stride_kb + group * stride_kg, v + b * stride_vb + group * stride_vg
    position = tl.load(position_B + b).to(tl.int32)
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    if NEW:  # asked for together with position and query, and stored without a branch: one latency, not three
        k_D = tl.load(k_new + b * stride_k_new + group * WIDTH + d)
        v_D = tl.load(v_new + b * stride_v_new + group * WIDTH + d)
    head = group * REPEAT + r
    at = b * stride_q + (head * WIDTH)[:, None] + d[None, :]
    q_MD = tl.load(q + at, mask=(r < REPEAT)[:, None], other=0.0)
    if NEW:
        mine = d >= 0
        if not WHOLE:
            mine = mine & (position // CHUNK % tl.num_programs(0) == tl.program_id(0))
        to = position.to(tl.int64)
        tl.store(k_at + to * stride_ks + d, k_D, mask=mine)
        tl.store(v_at + to * stride_vs + d, v_D, mask=mine)
        tl.debug_barrier()
    position_M = tl.full([ROWS], 0, tl.int32) + position
    largest = tl.full([ROWS], _EMPTY, tl.float32)
    weight, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for chunk in range(tl.program_id(0), position // CHUNK + 1, tl.num_programs(0)):
        end = tl.minimum((chunk + 1) * CHUNK, position + 1)
        chunk_largest, chunk_weight, chunk_total = _chunk(
            q_MD, k_at, v_at, stride_ks, stride_vs, chunk * CHUNK, end, position_M, scale, ROWS, WIDTH, TILE
        )
        if WHOLE:
            largest, weight, total = _merge(largest, weight, total, chunk_largest, chunk_weight, chunk_total)
        else:
            place = (b * num_heads + head) * max_chunks + chunk
            tl.store(part_largest + place, chunk_largest, mask=r < REPEAT)
            tl.store(part_weight + place, chunk_weight, mask=r < REPEAT)
            tl.store(part_total + place[:, None] * WIDTH + d[None, :], chunk_total, mask=(r < REPEAT)[:, None])
    if WHOLE:
        place = (b * num_heads + head)[:, None] * WIDTH + d[None, :]
        tl.store(out + place, _finish(weight, total), mask=(r < REPEAT)[:, None])


@triton.jit
def _decode_merge(
    part_largest, part_weight, part_total, out, position_B, num_heads, max_chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head, b = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.program_id(1).to(tl.int64)
    position = tl.load(position_B + b, cache_modifier=".cg").to(tl.int32)  # `_decode` comes before, and has waited
    begin(EARLY)
    d = tl.arange(0, WIDTH)
    row = b * num_heads + head
    inside = head < num_heads
    largest = tl.full([HEADS], _EMPTY, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    for chunk in tl.range(0, position // CHUNK + 1, num_stages=STAGES):
        place = row * max_chunks + chunk
        chunk_largest = tl.load(part_largest + place, mask=inside, other=0.0)
        chunk_weight = tl.load(part_weight + place, mask=inside, other=1.0)
        chunk_total = tl.load(part_total + place[:, None] * WIDTH + d[None, :], mask=inside[:, None], other=0.0)
        largest, weight, total = _merge(largest, weight, total, chunk_largest, chunk_weight, chunk_total)
    tl.store(out + row[:, None] * WIDTH + d[None, :], _finish(weight, total), mask=inside[:, None])


def scale_of(width: int) -> float:
    """Factor on scores whose exponential is taken to base 2."""
    return width**-0.5 * LOG2_E


def prefill(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, first_B: Tensor, length_B: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences, each over its own keys: BF16 [N, H, D] and FP32 [N, H] log2 of the sums.

    q, k, v           BF16, heads contiguous in a row; H a multiple of G; D one of WIDTHS
    first_B, length_B int64: rows first .. first + length - 1 are positions 0 .. length - 1 of sequence b
    longest           at least every length, on the host
    Rows of no sequence are zero. NaN in a visible key or value spreads to the queries that see it.
    """
    num_rows, num_heads, width = q_NHD.shape
    repeat = _check(q_NHD, k_NGD, v_NGD)
    out, lse = q_NHD.new_zeros(q_NHD.shape), empty(num_rows, num_heads, dtype=float32, device=q_NHD.device)
    rows = 128 if width <= 128 else 64
    if longest * repeat <= 64:
        rows = 64
    grid = (triton.cdiv(max(1, longest) * repeat, rows), k_NGD.shape[1], len(first_B))
    _prefill[grid](
        q_NHD, k_NGD, v_NGD, out, lse, first_B, length_B, q_NHD.stride(0), k_NGD.stride(0), v_NGD.stride(0),
        scale_of(width), num_heads,
        REPEAT=repeat, ROWS=rows, WIDTH=width, TILE=TILE, CHUNK=CHUNK, num_warps=8 if rows == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out, lse


def num_splits(num_sequences: int, num_groups: int, max_chunks: int) -> int:
    """Programs that share the chunks of one sequence and key head: some four a multiprocessor, no more than shorten it.

    0: one walks them all as in prefill, and nothing is merged. So where sequences alone are two on a multiprocessor or
    more, as long as none can be so long that the others would wait for it.
    """
    programs = num_sequences * num_groups
    if max_chunks == 1 or (max_chunks <= FEW_CHUNKS and programs >= 1.5 * MULTIPROCESSORS):
        return 0
    most = triton.cdiv(max_chunks, max(1, min(max_chunks, triton.cdiv(4 * MULTIPROCESSORS, programs))))
    return triton.cdiv(max_chunks, most)


def decode(
    q_NHD: Tensor,
    k_SGLD: Tensor,
    v_SGLD: Tensor,
    position_N: Tensor,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    warps: int = 4,
    stages: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """One query per sequence over cached keys: BF16 [N, H, D], the bytes that `prefill` gives for that position.

    q_NHD            BF16; query n belongs to slot n
    k_SGLD, v_SGLD   BF16 slots [S, G, positions, D], any strides but 1 along D, S at least N
    position_N       int64 or int32, on the device; keys 0 .. position are seen
    new              BF16 [N, G, D] key and value of position_N, which are written to the cache first
    warps, stages, splits  change the speed only; see `num_splits` for the last
    Nothing here waits for the device, and no shape depends on positions, so that it can be captured.
    """
    num_rows, num_heads, width = q_NHD.shape
    repeat = _check(q_NHD, k_SGLD[0].transpose(0, 1), v_SGLD[0].transpose(0, 1))
    num_groups = k_SGLD.shape[1]
    max_chunks = triton.cdiv(k_SGLD.shape[2], CHUNK)
    splits = num_splits(num_rows, num_groups, max_chunks) if splits is None else splits
    whole = splits == 0 or max_chunks == 1
    shares = 1 if whole else splits
    programs = shares * num_groups * num_rows
    if stages is None:  # two tiles under way where shared memory has room for those of all programs, three each
        stages = 3 if programs <= 3 * MULTIPROCESSORS and width <= 128 else 2
    count = 0 if whole else num_rows * num_heads * max_chunks
    states = empty(count, width + 2, dtype=float32, device=q_NHD.device).flatten()
    largest, weight, total = states[:count], states[count : 2 * count], states[2 * count :]
    out = q_NHD.new_empty(q_NHD.shape) if out is None else out
    k_new, v_new = (q_NHD, q_NHD) if new is None else new
    _decode[(shares, num_groups, num_rows)](
        q_NHD, k_SGLD, v_SGLD, k_new, v_new, largest, weight, total, out, position_N,
        q_NHD.stride(0), k_new.stride(0), v_new.stride(0), *k_SGLD.stride()[:3], *v_SGLD.stride()[:3],
        scale_of(width), num_heads, max_chunks,
        REPEAT=repeat, ROWS=max(16, triton.next_power_of_2(repeat)), WIDTH=width, TILE=TILE, CHUNK=CHUNK,
        NEW=new is not None, WHOLE=whole, num_warps=warps, num_stages=stages, **options(q_NHD.device),
    )  # fmt: skip
    if whole:
        return out
    together = 8 if num_rows >= 64 else 1  # few rows: as many programs as there can be
    _decode_merge[(triton.cdiv(num_heads, together), num_rows)](
        largest, weight, total, out, position_N, num_heads, max_chunks,
        WIDTH=width, CHUNK=CHUNK, STAGES=4, HEADS=together, num_warps=4 if together > 1 else 1,
        **options(q_NHD.device),
    )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Query heads per key head, of [rows, heads, D]."""
    num_heads, width = q.shape[1:]
    if width not in WIDTHS or num_heads % k.shape[1] or k.shape[-1] != width or v.shape[-1] != width:
        raise CapabilityError(
            f"attention in Triton: {num_heads} query and {k.shape[1]} key heads of {width}; widths {WIDTHS} "
            'and whole groups are covered, the rest by kernels = "plain"'
        )
    if q.stride(1) != width or q.stride(2) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise CapabilityError("attention in Triton: the heads of a row must lie side by side")
    return num_heads // k.shape[1]
