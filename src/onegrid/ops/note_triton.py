"""`ops.note` on NVIDIA GPUs: one kernel, whole numbers and copies only, so the bytes are the definition's."""

import triton
import triton.language as tl
from torch import Tensor, int8
from torch import bool as bool_

from onegrid.ops.early import begin, options
from onegrid.ops.note import ENDED, FINITE, LENGTH, STOPPED, Held, Next

_ROWS = 32
"""Slots of one program."""
_STOPS = 16
"""Stop tokens that are compared at once."""


@triton.jit
def _note(
    drawn, drawn_logp, finite, tokens, logp, length, prompt, limit, forced, report, stops, token, position, owned,
    num_rows, stride_tokens, stride_logp, stride_report, max_len, num_stops, num_positions,
    ENDED: tl.constexpr, STOPPED: tl.constexpr, FINITE: tl.constexpr, LENGTH: tl.constexpr,
    ROWS: tl.constexpr, STOPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    was_ended = tl.load(report + ENDED * stride_report + row, mask=inside, other=1)
    running = was_ended == 0
    count = tl.load(length + row, mask=inside, other=0)
    must = tl.load(forced + row, mask=inside, other=-1)
    new = tl.where(must < 0, tl.load(drawn + row, mask=inside, other=0), must)
    column = tl.minimum(count, max_len - 1)
    wide = row.to(tl.int64)
    tl.store(tokens + wide * stride_tokens + column, new, mask=running)
    new_logp = tl.load(drawn_logp + row, mask=inside, other=0.0)
    tl.store(logp + wide * stride_logp + column, new_logp, mask=running)
    count += running.to(tl.int64)
    stopped = tl.zeros([ROWS], tl.int64)
    for first in range(0, num_stops, STOPS):
        k = first + tl.arange(0, STOPS)
        stop = tl.load(stops + k, mask=k < num_stops, other=0)
        hit = (new[:, None] == stop[None, :]) & (k < num_stops)[None, :] & running[:, None]
        stopped |= tl.max(hit.to(tl.int64), 1)
    ended = was_ended | stopped | (count >= tl.load(limit + row, mask=inside, other=0)).to(tl.int64)
    tl.store(report + ENDED * stride_report + row, ended, mask=inside)
    held = tl.load(report + STOPPED * stride_report + row, mask=inside, other=0)
    tl.store(report + STOPPED * stride_report + row, held | stopped, mask=inside)
    good = (tl.load(finite + row, mask=inside, other=1) != 0) | (was_ended != 0)
    held = tl.load(report + FINITE * stride_report + row, mask=inside, other=1)
    tl.store(report + FINITE * stride_report + row, held & good.to(tl.int64), mask=inside)
    tl.store(report + LENGTH * stride_report + row, count, mask=inside)
    tl.store(length + row, count, mask=inside)
    at = tl.load(prompt + row, mask=inside, other=0) + count - 1
    tl.store(token + row, new, mask=inside)
    tl.store(position + row, tl.minimum(tl.maximum(at, 0), num_positions - 1), mask=inside)
    tl.store(owned + row, (ended == 0).to(tl.int8), mask=inside)


def note(drawn: tuple[Tensor, Tensor, Tensor], held: Held, stop_K: Tensor, num_positions: int) -> Next:
    """See `ops.note.note`. Numbers of a slot lie together, as `State.empty` makes them."""
    token_N, logp_N, finite_N = drawn
    num_rows = len(token_N)
    token, position = token_N.new_empty(num_rows), token_N.new_empty(num_rows)
    owned = token_N.new_empty(num_rows, dtype=int8)
    if num_rows:
        _note[(triton.cdiv(num_rows, _ROWS),)](
            token_N, logp_N, finite_N.view(int8), held.tokens_SR, held.logp_SR, held.length_S, held.prompt_S,
            held.limit_S, held.forced_S, held.report_4S, stop_K, token, position, owned,
            num_rows, held.tokens_SR.stride(0), held.logp_SR.stride(0), held.report_4S.stride(0),
            held.tokens_SR.shape[1], len(stop_K), num_positions,
            ENDED=ENDED, STOPPED=STOPPED, FINITE=FINITE, LENGTH=LENGTH, ROWS=_ROWS, STOPS=_STOPS, num_warps=1,
            **options(token_N.device),
        )  # fmt: skip
    return Next(token, position, owned.view(bool_))
