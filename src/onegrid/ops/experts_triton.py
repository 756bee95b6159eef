"""Choosing experts, finding places for their tokens, and rows there and back, as one kernel each on NVIDIA GPUs.

Copies, whole numbers, comparisons, and sums in slot order whose products are rounded before they are added: the
definitions' bytes. None has gradients. In a decode step launches would cost more than the work.
"""

import triton
import triton.language as tl
from torch import Tensor, bfloat16, int8, int16, int32, int64

from onegrid.ops.early import begin, options
from onegrid.ops.fused_triton import _mul
from onegrid.ops.grouped import Dispatch

_BLOCK = 1024
"""Numbers of a row that one program brings back."""
_FILL = 128
"""Empty places that are written at once."""
_BITS = {1: int8, 2: int16, 4: int32, 8: int64}


@triton.jit
def _route(
    probability, expert, weight, num_experts,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    p = tl.load(probability + row * num_experts + e, mask=e < num_experts, other=-1.0)
    left = tl.where(p == p, p, float("inf"))  # a sort puts NaN before everything
    ids = tl.zeros([SLOTS], tl.int64)
    kept = tl.full([SLOTS], 1.0, tl.float32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), e, EXPERTS), 0)
        value = tl.sum(tl.where(e == best, p, 0.0), 0)
        total = value if slot == 0 else total + value
        ids = tl.where(k == slot, best.to(tl.int64), ids)
        kept = tl.where(k == slot, value, kept)
        left = tl.where(e == best, -2.0, left)
    if NORMALIZE:
        kept = tl.div_rn(kept, tl.zeros([SLOTS], tl.float32) + total)
    tl.store(expert + row * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(weight + row * TOP_K + k, kept, mask=k < TOP_K)


@triton.jit
def _dispatch(
    expert, owned, place, source, pair, ends, num_pairs, num_places, num_experts, top_k, tile,
    HAS_MASK: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, FILL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program an expert, and one more for pairs and places that belong to none."""
    begin(EARLY)
    mine = tl.program_id(0)
    p = tl.arange(0, PAIRS)
    there = p < num_pairs
    ids = tl.load(expert + p, mask=there, other=num_experts).to(tl.int32)
    if HAS_MASK:
        ids = tl.where(tl.load(owned + p // top_k, mask=there, other=0) != 0, ids, num_experts)
    e = tl.arange(0, EXPERTS)
    count = tl.where(e < num_experts, tl.histogram(ids, EXPERTS), 0)
    count = (count + tile - 1) // tile * tile
    first = tl.sum(tl.where(e < mine, count, 0), 0)
    end = first + tl.sum(tl.where(e == mine, count, 0), 0)
    hit = there & (ids == mine)
    at = first + tl.cumsum(hit.to(tl.int32), 0) - 1
    used = first + tl.sum(hit.to(tl.int32), 0)
    if mine < num_experts:
        tl.store(place + p, at.to(tl.int64), mask=hit)
        tl.store(pair + at, p.to(tl.int64), mask=hit)
        tl.store(source + at, (p // top_k).to(tl.int64), mask=hit)
        tl.store(ends + mine, end)
    else:
        tl.store(place + p, tl.zeros([PAIRS], tl.int64) + num_places, mask=hit)
        used, end = first, num_places
    nobody = tl.zeros([FILL], tl.int64)
    for start in range(used, end, FILL):
        empty = start + tl.arange(0, FILL)
        tl.store(pair + empty, nobody + num_pairs, mask=empty < end)
        tl.store(source + empty, nobody + num_pairs // top_k, mask=empty < end)


@triton.jit
def _bring_back(
    y, place, weight, extra, out, width, num_places,
    TOP_K: tl.constexpr, HAS_EXTRA: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        at = tl.load(place + row * TOP_K + slot)
        value = tl.load(y + at * width + d, mask=inside & (at < num_places), other=0.0).to(tl.float32)
        term = _mul(value, tl.zeros([BLOCK], tl.float32) + tl.load(weight + row * TOP_K + slot))
        total = term if slot == 0 else total + term
    if HAS_EXTRA:
        total += tl.load(extra + row * width + d, mask=inside, other=0.0)
    tl.store(out + row * width + d, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _take(x, index, out, num_rows, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    bits = tl.load(x + source * width + d, mask=(d < width) & (source < num_rows), other=0)
    tl.store(out + row * width + d, bits, mask=d < width)


def choose(probability_NE: Tensor, *, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Expert ids int64 and FP32 weights [N, k] of `ops.routing.route`, from its probabilities."""
    probability_NE = probability_NE.contiguous()
    num_rows, num_experts = probability_NE.shape
    expert = probability_NE.new_empty(num_rows, top_k, dtype=int64)
    weight = probability_NE.new_empty(num_rows, top_k)
    if num_rows:
        _route[(num_rows,)](
            probability_NE, expert, weight, num_experts, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k),
            NORMALIZE=normalize, EXPERTS=triton.next_power_of_2(num_experts), num_warps=1,
            **options(probability_NE.device),
        )  # fmt: skip
    return expert, weight


def dispatch(expert_NK: Tensor, mask_N: Tensor | None, num_experts: int, num_places: int, tile: int) -> Dispatch:
    """See `ops.grouped.dispatch`; at least one pair."""
    expert_NK = expert_NK.contiguous()
    num_pairs, top_k = expert_NK.numel(), expert_NK.shape[1]
    place = expert_NK.new_empty(expert_NK.shape)
    source, pair = expert_NK.new_empty(num_places), expert_NK.new_empty(num_places)
    ends = expert_NK.new_empty(num_experts, dtype=int32)
    _dispatch[(num_experts + 1,)](
        expert_NK, expert_NK if mask_N is None else mask_N, place, source, pair, ends,
        num_pairs, num_places, num_experts, top_k, tile, HAS_MASK=mask_N is not None,
        PAIRS=max(128, triton.next_power_of_2(num_pairs)), EXPERTS=max(128, triton.next_power_of_2(num_experts + 1)),
        FILL=_FILL, num_warps=4, **options(expert_NK.device),
    )  # fmt: skip
    return Dispatch(place, source, pair, ends)


def bring_back(y_PD: Tensor, places: Dispatch, weight_NK: Tensor, extra_ND: Tensor | None) -> Tensor:
    """See `ops.grouped.bring_back`."""
    y_PD, weight_NK = y_PD.contiguous(), weight_NK.contiguous()
    (num_rows, top_k), width = weight_NK.shape, y_PD.shape[1]
    out = y_PD.new_empty(num_rows, width, dtype=bfloat16)
    if num_rows:
        _bring_back[(num_rows, triton.cdiv(width, _BLOCK))](
            y_PD, places.place_NK, weight_NK, weight_NK if extra_ND is None else extra_ND.contiguous(), out,
            width, len(y_PD), TOP_K=top_k, HAS_EXTRA=extra_ND is not None, BLOCK=_BLOCK, num_warps=4,
            **options(y_PD.device),
        )  # fmt: skip
    return out


def take(x_ND: Tensor, index: Tensor) -> Tensor:
    """See `ops.grouped.take`."""
    x_ND, index = x_ND.contiguous(), index.contiguous()
    out = x_ND.new_empty(*index.shape, *x_ND.shape[1:])
    if out.numel():
        width = out.numel() // index.numel()
        block = min(_BLOCK, triton.next_power_of_2(width))
        bits = _BITS[x_ND.element_size()]
        _take[(index.numel(), triton.cdiv(width, block))](
            x_ND.view(bits), index, out.view(bits), len(x_ND), width, BLOCK=block, num_warps=max(1, block // 256),
            **options(x_ND.device),
        )  # fmt: skip
    return out
