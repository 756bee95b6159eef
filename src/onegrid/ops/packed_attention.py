"""Causal attention of sequences whose tokens lie one after another as rows: what a learner and a prefill need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegrid.ops.attention import attention
from onegrid.ops.grouped import Dispatch, Gather, Scatter


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the sequences of a pack lie: rows first .. first + length - 1 are positions 0 .. length - 1 of a sequence.

    first_B, length_B  int64 on the device; longest: the largest length, on the host
    rectangle          row to (sequence, position) and back, in the form of a dispatch with one slot
    """

    first_B: Tensor
    length_B: Tensor
    longest: int
    rectangle: Dispatch


def segments_of(firsts: list[int], lengths: list[int], num_rows: int, device: torch.device | str) -> Segments:
    """Segments of sequences that start at rows `firsts`, among `num_rows` rows; the rest are padding."""
    longest = max(lengths, default=0)
    first_B, length_B = torch.tensor(firsts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), length_B)
    position = torch.arange(len(sequence)) - (length_B.cumsum(0) - length_B)[sequence]
    row = first_B[sequence] + position
    place = torch.full((num_rows,), len(lengths) * longest, dtype=torch.int64)
    source = torch.full((len(lengths) * longest,), num_rows, dtype=torch.int64)
    place[row] = sequence * longest + position
    source[sequence * longest + position] = row
    source = source.to(device)
    rectangle = Dispatch(place[:, None].to(device), source, source)
    return Segments(first_B.to(device), length_B.to(device), longest, rectangle)


def packed_attention(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, segments: Segments) -> Tensor:
    """`attention` of every sequence over its own keys, BF16 [N, H, D]; rows of no sequence are zero. Differentiable."""
    rectangle = segments.rectangle
    sizes = (len(segments.first_B), segments.longest)
    start_B = torch.zeros_like(segments.first_B)
    q, k, v = (Scatter.apply(t.flatten(1), rectangle).view(*sizes, *t.shape[1:]) for t in (q_NHD, k_NGD, v_NGD))
    out = attention(q, k, v, start_B)
    return Gather.apply(out.reshape(-1, q_NHD.shape[1] * q_NHD.shape[2]), rectangle)[:, 0].view(q_NHD.shape)


class TritonPackedAttention(torch.autograd.Function):
    """The same by the kernels of `attention_triton`: chunks of another size, so other bits than `packed_attention`."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, segments: Segments) -> Tensor:
        """BF16 in and out."""
        from onegrid.ops import attention_triton

        out, lse = attention_triton.prefill(q_NHD, k_NGD, v_NGD, segments.first_B, segments.length_B, segments.longest)
        ctx.segments = segments
        ctx.save_for_backward(q_NHD, k_NGD, v_NGD, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Deterministic: no atomics."""
        from onegrid.ops import attention_backward_triton

        q, k, v, out, lse = ctx.saved_tensors
        s = ctx.segments
        grads = attention_backward_triton.backward(dout, out, lse, q, k, v, s.first_B, s.length_B, s.longest)
        return *grads, None


def triton_packed_attention(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, segments: Segments) -> Tensor:
    """`packed_attention` on NVIDIA GPUs, differentiable."""
    return TritonPackedAttention.apply(q_NHD, k_NGD, v_NGD, segments)


def triton_slots(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, keys_SGLD: Tensor, values_SGLD: Tensor, position_N: Tensor
) -> Tensor:
    """One new token per slot on NVIDIA GPUs: its key and value are written to the cache, then it attends. BF16.

    keys_SGLD, values_SGLD  BF16 [slots, G, positions, D]; row n is slot n at position_N[n]
    The bytes of `triton_packed_attention` for that position. Waits for nothing, so it can be captured.
    """
    from onegrid.ops import attention_triton

    return attention_triton.decode(q_NHD, keys_SGLD, values_SGLD, position_N, new=(k_NGD, v_NGD))
