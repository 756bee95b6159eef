"""Moving tokens to experts and back: rows sorted by expert, one matmul an expert, gathers both ways.

Every expert's rows start at a multiple of TILE and are filled up with zeros, so that nothing is computed for an expert
that has few, and an expert's result for a token does not depend on who shares the expert. Both backward passes are
gathers in slot order: no atomics, no order left open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegrid.ops.linear import matmul
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where every (token, slot) went among P places.

    place_NK   int64 [N, k]: place of the pair, or P for a dropped padding row
    source     int64 [P]: token of a place, or N where the place is empty
    pair       int64 [P]: token * k + slot of a place, or N * k where empty
    bounds     expert e has places bounds[e] .. bounds[e + 1] - 1
    """

    place_NK: Tensor
    source: Tensor
    pair: Tensor
    bounds: tuple[int, ...] = ()

    def groups(self) -> list[tuple[int, slice]]:
        """(expert, its places), of the experts that have any."""
        pairs = enumerate(zip(self.bounds, self.bounds[1:], strict=False))
        return [(expert, slice(start, end)) for expert, (start, end) in pairs if end > start]


def dispatch(expert_NK: Tensor, mask_N: Tensor, num_experts: int) -> Dispatch:
    """Places of all (token, slot) pairs, experts ascending, tokens ascending inside an expert. Masked rows go nowhere.

    expert_NK  int64 ids in 0 .. num_experts - 1; mask_N bool, False for padding rows. Zero tokens are valid.
    """
    num_tokens, top_k = expert_NK.shape
    device = expert_NK.device
    expert = torch.where(mask_N[:, None], expert_NK, num_experts).flatten()
    order = torch.sort(expert, stable=True).indices
    count = torch.bincount(expert, minlength=num_experts + 1)
    bounds = [0]
    for rows in count[:num_experts].tolist():
        bounds.append(bounds[-1] + round_up(rows, TILE))
    num_places = bounds[-1]
    first = torch.cumsum(count, 0) - count
    begin = torch.tensor(bounds, device=device)
    place = torch.empty_like(expert)
    place[order] = torch.arange(expert.numel(), device=device) + (begin - first)[expert[order]]
    place = torch.where(expert < num_experts, place, num_places)
    pair = torch.full((num_places + 1,), expert.numel(), dtype=torch.int64, device=device)
    pair[place] = torch.arange(expert.numel(), device=device)
    pair = pair[:num_places]
    return Dispatch(place.view(num_tokens, top_k), pair // top_k, pair, tuple(bounds))


def grouped_matmul(a: Operand, b: Operand, groups: list[tuple[int, slice]]) -> Tensor:
    """Every expert's places of `a` [P, K] times its matrix of `b` [E, N, K]: BF16 [P, N]. No place gives [0, N]."""
    if not groups:
        return a.values.new_zeros(0, b.values.shape[-2], dtype=torch.bfloat16)
    return torch.cat([matmul(a.part(rows), b.part(expert)) for expert, rows in groups])


class Scatter(torch.autograd.Function):
    """Rows [N, D] to places [P, D]; empty places are zero."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, d: Dispatch) -> Tensor:
        """Gather by source token."""
        ctx.dispatch = d
        return take(x_ND, d.source)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Sum of the k places of each token, FP32, slot order."""
        d = ctx.dispatch
        total = take(dy, d.place_NK[:, 0])
        if d.place_NK.shape[1] == 1:
            return total, None
        total = total.float()
        for slot in range(1, d.place_NK.shape[1]):
            total = total + take(dy, d.place_NK[:, slot]).float()
        return total.to(dy.dtype), None


class Gather(torch.autograd.Function):
    """Places [P, D] back to [N, k, D]; dropped rows are zero."""

    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, d: Dispatch) -> Tensor:
        """Gather by place."""
        ctx.dispatch = d
        return take(y_PD, d.place_NK)

    @staticmethod
    def backward(ctx: Any, dy_NKD: Tensor) -> tuple[Tensor, None]:
        """Every place has at most one pair: a gather again."""
        return take(dy_NKD.reshape(-1, dy_NKD.shape[-1]), ctx.dispatch.pair), None


def take(x_ND: Tensor, index: Tensor) -> Tensor:
    """Rows of `x_ND` by index, where index N (one past the end) gives a zero row."""
    return torch.cat((x_ND, x_ND.new_zeros(1, *x_ND.shape[1:])))[index]


def combine(y_NKD: Tensor, weight_NK: Tensor) -> Tensor:
    """FP32 sum over slots of weight times output, slot 0 first: [N, D]."""
    total = y_NKD[:, 0].float() * weight_NK[:, :1]
    for slot in range(1, y_NKD.shape[1]):
        total = total + y_NKD[:, slot].float() * weight_NK[:, slot : slot + 1]
    return total
