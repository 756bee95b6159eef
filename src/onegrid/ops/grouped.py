"""Moving tokens to experts and back: one rectangle [experts, capacity, D] for one batched matmul, gathers both ways.

Rows keep their values on the way, so an expert's result for a token does not depend on who shares the expert.
Both backward passes are gathers in slot order: no atomics, no order left open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegrid.ops.pins import TILE, round_up


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where every (token, slot) went.

    place_NK   int64 [N, k]: place of the pair in the flattened rectangle, or E * capacity for a dropped padding row
    source     int64 [E * capacity]: token of a place, or N where the place is empty
    pair       int64 [E * capacity]: token * k + slot of a place, or N * k where empty
    """

    place_NK: Tensor
    source: Tensor
    pair: Tensor
    num_experts: int
    capacity: int


def dispatch(expert_NK: Tensor, mask_N: Tensor, num_experts: int) -> Dispatch:
    """Places of all (token, slot) pairs, experts ascending, tokens ascending inside an expert. Masked rows go nowhere.

    expert_NK  int64 ids in 0 .. num_experts - 1; mask_N bool, False for padding rows. Zero tokens are valid.
    """
    num_tokens, top_k = expert_NK.shape
    device = expert_NK.device
    expert = torch.where(mask_N[:, None], expert_NK, num_experts).flatten()
    order = torch.sort(expert, stable=True).indices
    count = torch.bincount(expert, minlength=num_experts + 1)
    first = torch.cumsum(count, 0) - count
    rank = torch.empty_like(expert)
    rank[order] = torch.arange(expert.numel(), device=device) - first[expert[order]]
    capacity = max(TILE, round_up(int(count[:num_experts].max()) if expert.numel() else 0, TILE))
    num_places = num_experts * capacity
    place = torch.where(expert < num_experts, expert * capacity + rank, num_places)
    pair = torch.full((num_places + 1,), expert.numel(), dtype=torch.int64, device=device)
    pair[place] = torch.arange(expert.numel(), device=device)
    pair = pair[:num_places]
    return Dispatch(place.view(num_tokens, top_k), pair // top_k, pair, num_experts, capacity)


class Scatter(torch.autograd.Function):
    """Rows [N, D] to the rectangle [E, capacity, D]; empty places are zero."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, d: Dispatch) -> Tensor:
        """Gather by source token."""
        ctx.dispatch = d
        return take(x_ND, d.source).view(d.num_experts, d.capacity, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Sum of the k places of each token, FP32, slot order."""
        d = ctx.dispatch
        flat = dy.reshape(-1, dy.shape[-1])
        total = take(flat, d.place_NK[:, 0]).float()
        for slot in range(1, d.place_NK.shape[1]):
            total = total + take(flat, d.place_NK[:, slot]).float()
        return total.to(dy.dtype), None


class Gather(torch.autograd.Function):
    """The rectangle [E, capacity, D] back to [N, k, D]; dropped rows are zero."""

    @staticmethod
    def forward(ctx: Any, y_ECD: Tensor, d: Dispatch) -> Tensor:
        """Gather by place."""
        ctx.dispatch = d
        num_tokens, top_k = d.place_NK.shape
        return take(y_ECD.reshape(-1, y_ECD.shape[-1]), d.place_NK.flatten()).view(num_tokens, top_k, -1)

    @staticmethod
    def backward(ctx: Any, dy_NKD: Tensor) -> tuple[Tensor, None]:
        """Every place has at most one pair: a gather again."""
        d = ctx.dispatch
        flat = dy_NKD.reshape(-1, dy_NKD.shape[-1])
        return take(flat, d.pair).view(d.num_experts, d.capacity, -1), None


def take(x_ND: Tensor, index: Tensor) -> Tensor:
    """Rows of `x_ND` by index, where index N (one past the end) gives a zero row."""
    return torch.cat((x_ND, x_ND.new_zeros(1, *x_ND.shape[1:])))[index]


def combine(y_NKD: Tensor, weight_NK: Tensor) -> Tensor:
    """FP32 sum over slots of weight times output, slot 0 first: [N, D]."""
    total = y_NKD[:, 0].float() * weight_NK[:, :1]
    for slot in range(1, y_NKD.shape[1]):
        total = total + y_NKD[:, slot].float() * weight_NK[:, slot : slot + 1]
    return total
