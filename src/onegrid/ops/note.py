"""What a decode step notes of the tokens that it drew: the responses, who has ended, and where the next ones stand.

Two dozen operations on a number or two of each row: on a GPU every one of them would be launch cost alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ENDED, STOPPED, FINITE, LENGTH = range(4)
"""Rows of a report: ended, stopped by a token, every logit so far finite, tokens of the response."""


class Held(Protocol):
    """What is kept by slot, see `sampler.graphs.State`; int64 where nothing else is said."""

    tokens_SR: Tensor
    logp_SR: Tensor
    """FP32"""
    length_S: Tensor
    prompt_S: Tensor
    limit_S: Tensor
    forced_S: Tensor
    report_4S: Tensor


class Next(NamedTuple):
    """What the decoder is to run."""

    token_N: Tensor
    """int64"""
    position_N: Tensor
    """int64, of the token in its sequence."""
    owned_N: Tensor
    """bool: the row has not ended."""


def note(drawn: tuple[Tensor, Tensor, Tensor], held: Held, stop_K: Tensor, num_positions: int) -> Next:
    """Notes one token of each of the first N slots, in place.

    drawn          token int64, its log-probability FP32, whether the row is finite bool: [N] each
    stop_K         int64, none or more: tokens that end a response
    num_positions  positions are cut to those below it
    A forced token takes the place of the drawn one and keeps its log-probability. A row that has ended keeps all that
    it has. In a full response the last place is written again; its limit ends it before that.
    """
    token_N, logp_N, finite_N = drawn
    rows = slice(len(token_N))
    length_N, report_4N = held.length_S[rows], held.report_4S[:, rows]
    ended_N = report_4N[ENDED] != 0
    token_N = torch.where(held.forced_S[rows] < 0, token_N, held.forced_S[rows])
    column_N1 = length_N.clamp(max=held.tokens_SR.shape[1] - 1)[:, None]
    for held_SR, new_N in ((held.tokens_SR[rows], token_N), (held.logp_SR[rows], logp_N)):
        held_SR.scatter_(1, column_N1, torch.where(ended_N[:, None], held_SR.gather(1, column_N1), new_N[:, None]))
    length_N += ~ended_N
    stop_N = ~ended_N & (token_N[:, None] == stop_K).any(dim=1)
    report_4N[STOPPED] |= stop_N
    report_4N[ENDED] |= stop_N | (length_N >= held.limit_S[rows])
    report_4N[FINITE] &= finite_N | ended_N
    report_4N[LENGTH] = length_N
    position_N = (held.prompt_S[rows] + length_N - 1).clamp(min=0, max=num_positions - 1)
    return Next(token_N, position_N, report_4N[ENDED] == 0)


def triton_note(drawn: tuple[Tensor, Tensor, Tensor], held: Held, stop_K: Tensor, num_positions: int) -> Next:
    """`note` in one kernel. Waits for nothing."""
    from onegrid.ops import note_triton

    return note_triton.note(drawn, held, stop_K, num_positions)
