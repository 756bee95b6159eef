"""Causal attention whose decode equals its prefill: keys are walked in fixed chunks from position 0.

A query's result is a left fold over chunks of CHUNK keys (online softmax, Milakov and Gimelshein, arXiv 1805.02867).
A chunk that lies wholly in a query's future multiplies by 1 and adds 0, so it changes no bit, and a query may be
computed alone (decode), with its neighbours (prefill), or in a longer rectangle (learner), with equal bytes.
"""

from __future__ import annotations

from typing import Any

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
    return Attention.apply(q_BTHD, k_BSGD, v_BSGD, start_B)


class Attention(torch.autograd.Function):
    """The fold over chunks, and its gradient from recomputed probabilities (Dao, arXiv 2307.08691, algorithm 2)."""

    @staticmethod
    def forward(ctx: Any, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, start_B: Tensor) -> Tensor:
        """See `attention`."""
        q, position = _query_rows(q_BTHD, k_BSGD.shape[2]), _positions(q_BTHD, k_BSGD.shape[2], start_B)
        # Every chunk is CHUNK keys wide, the last one too: another width could be another order of sums.
        total = torch.zeros_like(q)
        weight = torch.zeros(*q.shape[:-1], 1, device=q.device)
        largest = torch.full_like(weight, -torch.inf)
        for start in range(0, k_BSGD.shape[1], CHUNK):
            score = _scores(q, _chunk(k_BSGD, start), position, start)
            new = torch.maximum(largest, score.amax(-1, keepdim=True))
            p = score.sub_(new).exp_()
            keep = torch.exp(largest - new)
            weight = weight.mul_(keep).add_(p.sum(-1, keepdim=True))
            total = total.mul_(keep).add_(torch.bmm(p, _chunk(v_BSGD, start)))
            largest = new
        out = total.div_(weight)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k_BSGD, v_BSGD, position, out, largest + weight.log())
        return _heads(out, q_BTHD.shape, k_BSGD.shape[2])

    @staticmethod
    def backward(ctx: Any, dout_BTHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K, dK = dS^T Q; FP32, chunks ascending."""
        q, k_BSGD, v_BSGD, position, out, logsum = ctx.saved_tensors
        num_slots, num_groups = k_BSGD.shape[1], k_BSGD.shape[2]
        dout = _query_rows(dout_BTHD, num_groups, scaled=False)
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), [], []
        for start in range(0, num_slots, CHUNK):
            k, v = _chunk(k_BSGD, start), _chunk(v_BSGD, start)
            p = _scores(q, k, position, start).sub_(logsum).exp_()
            dv.append(torch.bmm(p.mT, dout))
            ds = torch.bmm(dout, v.mT).sub_(delta).mul_(p)
            dk.append(torch.bmm(ds.mT, q))
            dq += torch.bmm(ds, k)
        dq *= dout_BTHD.shape[-1] ** -0.5
        shape = (len(k_BSGD), num_groups, -1, k_BSGD.shape[-1])
        dk_BSGD, dv_BSGD = (
            torch.cat(parts, dim=1).view(shape)[:, :, :num_slots].transpose(1, 2).to(k_BSGD.dtype) for parts in (dk, dv)
        )
        return _heads(dq, dout_BTHD.shape, num_groups), dk_BSGD, dv_BSGD, None


def _query_rows(q_BTHD: Tensor, num_groups: int, *, scaled: bool = True) -> Tensor:
    """FP32 [B G, rows, D]: the query heads of one key head are rows of one matrix, padded to HEAD_TILE."""
    num_batch, num_queries, num_heads, width = q_BTHD.shape
    q = q_BTHD.view(num_batch, num_queries, num_groups, num_heads // num_groups, width).permute(0, 2, 1, 3, 4).float()
    q = q.reshape(num_batch * num_groups, -1, width)
    return pad_rows(q * width**-0.5 if scaled else q, HEAD_TILE)


def _positions(q_BTHD: Tensor, num_groups: int, start_B: Tensor) -> Tensor:
    """int64 [B G, rows, 1]: position of every row of `_query_rows`."""
    _, num_queries, num_heads, _ = q_BTHD.shape
    position_BT = start_B[:, None] + torch.arange(num_queries, device=q_BTHD.device)
    position = position_BT.repeat_interleave(num_heads // num_groups, dim=1)
    return pad_rows(position.repeat_interleave(num_groups, dim=0).unsqueeze(-1), HEAD_TILE)


def _heads(out: Tensor, shape: torch.Size, num_groups: int) -> Tensor:
    """`_query_rows` undone: BF16 [B, T, H, D]."""
    num_batch, num_queries, num_heads, width = shape
    repeat = num_heads // num_groups
    out = out[:, : num_queries * repeat].reshape(num_batch, num_groups, num_queries, repeat, width)
    return out.permute(0, 2, 1, 3, 4).to(torch.bfloat16).reshape(shape)


def _scores(q: Tensor, k: Tensor, position: Tensor, start: int) -> Tensor:
    """Scaled scores against CHUNK keys, -Inf for keys of the future."""
    key = torch.arange(start, start + CHUNK, device=q.device)
    return torch.bmm(q, k.mT).masked_fill_(key > position, -torch.inf)


def _chunk(x_BSGD: Tensor, start: int) -> Tensor:
    """CHUNK slots from `start` as FP32 [B G, CHUNK, D], zeros beyond the end."""
    part = x_BSGD[:, start : start + CHUNK]
    missing = CHUNK - part.shape[1]
    part = part.permute(0, 2, 1, 3).float()
    if missing:
        part = torch.nn.functional.pad(part, (0, 0, 0, missing))
    return part.reshape(-1, CHUNK, part.shape[-1])
