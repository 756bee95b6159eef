"""Causal attention whose decode equals its prefill: keys are walked in fixed chunks from position 0.

A query's result is a left fold over chunks of CHUNK keys (online softmax, Milakov and Gimelshein, arXiv 1805.02867).
A chunk that lies wholly in a query's future multiplies by 1 and adds 0, so it changes no bit, and a query may be
computed alone (decode), with its neighbours (prefill), or in a longer rectangle (learner), with equal bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.ops.pins import CHUNK, HEAD_TILE, pad_rows


def attention(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, start_B: Tensor) -> Tensor:
    """Grouped-query causal attention, [B, T, H, D] BF16.

    q_BTHD   BF16. Query t of sequence b stands at position start_B[b] + t and sees keys 0 .. that position.
    k_BSGD   BF16, v_BSGD BF16: S slots of G key heads; H is a multiple of G. Slots no query sees may hold any finite
             value and change nothing; S need not be a multiple of CHUNK.
    start_B  int64
    NaN in a visible key or value spreads to the queries that see it. Differentiable in q, k and v.
    """
    num_batch, num_queries, num_heads, width = q_BTHD.shape
    num_slots, num_groups = k_BSGD.shape[1], k_BSGD.shape[2]
    repeat = num_heads // num_groups
    rows = num_queries * repeat
    # [B G, T r, D]: the query heads of one key head are rows of one matrix
    q = q_BTHD.reshape(num_batch, num_queries, num_groups, repeat, width).permute(0, 2, 1, 3, 4)
    q = pad_rows(q.reshape(num_batch * num_groups, rows, width).float() * width**-0.5, HEAD_TILE)
    position_BT = start_B[:, None] + torch.arange(num_queries, device=q.device)
    position = position_BT[:, None, :, None].expand(num_batch, num_groups, num_queries, repeat)
    position = pad_rows(position.reshape(num_batch * num_groups, rows, 1), HEAD_TILE)

    # Every chunk is CHUNK keys wide, the last one too: another width could be another order of sums.
    total = torch.zeros(*q.shape[:-1], width, device=q.device)
    weight = torch.zeros(*q.shape[:-1], 1, device=q.device)
    largest = torch.full_like(weight, -torch.inf)
    for start in range(0, num_slots, CHUNK):
        k, v = _chunk(k_BSGD, start), _chunk(v_BSGD, start)
        key = torch.arange(start, start + CHUNK, device=q.device)
        score = torch.bmm(q, k.mT).masked_fill(key > position, -torch.inf)
        new = torch.maximum(largest, score.detach().amax(-1, keepdim=True))
        p = torch.exp(score - new)
        keep = torch.exp(largest - new)
        weight = weight * keep + p.sum(-1, keepdim=True)
        total = total * keep + torch.bmm(p, v)
        largest = new
    out = (total / weight)[:, :rows].reshape(num_batch, num_groups, num_queries, repeat, width)
    return out.permute(0, 2, 1, 3, 4).reshape(num_batch, num_queries, num_heads, width).to(torch.bfloat16)


def _chunk(x_BSGD: Tensor, start: int) -> Tensor:
    """CHUNK slots from `start` as FP32 [B G, CHUNK, D], zeros beyond the end."""
    part = x_BSGD[:, start : start + CHUNK]
    missing = CHUNK - part.shape[1]
    part = part.permute(0, 2, 1, 3).float()
    if missing:
        part = torch.nn.functional.pad(part, (0, 0, 0, missing))
    return part.reshape(-1, CHUNK, part.shape[-1])
