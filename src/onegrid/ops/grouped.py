"""Moving tokens to experts and back: rows sorted by expert, one matmul an expert, gathers both ways.

Every expert's rows start at a multiple of a tile and are filled up with zeros, so that an expert's result for a token
does not depend on who shares the expert. A CPU gives experts as many places as they need. On a GPU the number of
places is the most that so many tokens can need, and where experts end is known on the device alone: nothing waits for
the host, so a step can be captured. Places behind the last expert belong to nobody: they are read as zeros, what
matmuls leave there is undefined, and nothing brings it back. All backward passes are gathers or sums in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onegrid.ops.linear import dot, matmul
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up
from onegrid.ops.quantize_compiled import has_triton

FEW = 4096
"""Pairs of a token and an expert that every program of a kernel may look through."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where every (token, slot) went among P places.

    place_NK   int64 [N, k]: place of the pair, or P for a dropped padding row
    source     int64 [P]: token of a place, or N where the place is empty
    pair       int64 [P]: token * k + slot of a place, or N * k where empty
    end_E      int32 [E]: where the places of each expert end; None where there are no experts
    """

    place_NK: Tensor
    source: Tensor
    pair: Tensor
    end_E: Tensor | None = None

    def groups(self) -> list[tuple[int, slice]]:
        """(expert, its places), of the experts that have any. Waits for the device."""
        assert self.end_E is not None
        ends = self.end_E.tolist()
        pairs = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        return [(expert, slice(start, end)) for expert, (start, end) in pairs if end > start]

    def cleared(self, x_PD: Tensor) -> Tensor:
        """`x_PD` with zeros where no token is: needed before anything that looks at all places at once."""
        return x_PD.masked_fill((self.pair == self.place_NK.numel())[:, None], 0.0)


def dispatch(expert_NK: Tensor, mask_N: Tensor | None, num_experts: int, *, tile: int = TILE) -> Dispatch:
    """Places of all (token, slot) pairs, experts ascending, tokens ascending inside an expert. Masked rows go nowhere.

    expert_NK  int64 ids in 0 .. num_experts - 1; zero tokens are valid
    mask_N     bool, False for padding rows; None: there is none
    tile       experts start at multiples of it
    """
    num_tokens, top_k = expert_NK.shape
    device, num_pairs = expert_NK.device, expert_NK.numel()
    expert = (expert_NK if mask_N is None else torch.where(mask_N[:, None], expert_NK, num_experts)).flatten()
    ascending, order = torch.sort(expert, stable=True)
    first = torch.searchsorted(ascending, torch.arange(num_experts + 1, device=device))
    count = first.diff()
    end_E = torch.cumsum((count + tile - 1) // tile * tile, 0)
    num_places = int(end_E[-1]) if device.type == "cpu" else _most_places(num_pairs, num_experts, tile)
    shift = torch.nn.functional.pad(end_E[:-1], (1, 1)) - first  # of the dropped ones: replaced below
    place = torch.empty_like(expert)
    place[order] = torch.arange(num_pairs, device=device) + shift[ascending]
    place = torch.where(expert < num_experts, place, num_places)
    pair = torch.full((num_places + 1,), num_pairs, dtype=torch.int64, device=device)
    pair[place] = torch.arange(num_pairs, device=device)
    pair = pair[:num_places]
    return Dispatch(place.view(num_tokens, top_k), pair // top_k, pair, end_E.to(torch.int32))


def triton_dispatch(expert_NK: Tensor, mask_N: Tensor | None, num_experts: int, *, tile: int = TILE) -> Dispatch:
    """`dispatch` on NVIDIA GPUs: one kernel for up to FEW pairs."""
    if not 0 < expert_NK.numel() <= FEW:
        return dispatch(expert_NK, mask_N, num_experts, tile=tile)
    from onegrid.ops import experts_triton

    num_places = _most_places(expert_NK.numel(), num_experts, tile)
    return experts_triton.dispatch(expert_NK, mask_N, num_experts, num_places, tile)


def _most_places(num_pairs: int, num_experts: int, tile: int) -> int:
    """The most places that so many pairs can need."""
    return round_up(num_pairs + min(num_experts, num_pairs) * (tile - 1), tile)


def grouped_matmul(a: Operand, b: Operand, places: Dispatch) -> Tensor:
    """Every expert's places of `a` [P, K] times its matrix of `b` [E, N, K]: BF16 [P, N]. No place gives [0, N].

    The definition is `by_expert`; on NVIDIA GPUs the kernels of `grouped_cuda`, which know the experts' ends on the
    device only.
    """
    if a.values.is_cuda and len(a.values):
        from onegrid.ops import grouped_cuda

        return grouped_cuda.grouped_matmul(a, b, places)
    return by_expert(a, b, places)


def by_expert(a: Operand, b: Operand, places: Dispatch) -> Tensor:
    """The definition of `grouped_matmul`: one matmul an expert."""
    out = a.values.new_zeros(len(a.values), b.values.shape[-2], dtype=torch.bfloat16)
    for expert, rows in places.groups():
        out[rows] = matmul(a.part(rows), b.part(expert))
    return out


def grouped_wgrad(dy_PN: Tensor, x_PK: Tensor, places: Dispatch) -> Tensor:
    """Sum over every expert's places of dy times x: FP32 [E, N, K], zeros for experts without any.

    dy_PN, x_PK  exact values in the compute dtype, of any strides
    """
    if dy_PN.is_cuda and len(dy_PN):
        from onegrid.ops import grouped_cuda

        return grouped_cuda.grouped_wgrad(dy_PN, x_PK, places)
    return wgrad_by_expert(dy_PN, x_PK, places)


def wgrad_by_expert(dy_PN: Tensor, x_PK: Tensor, places: Dispatch) -> Tensor:
    """The definition of `grouped_wgrad`: one matmul an expert."""
    assert places.end_E is not None
    shape = (len(places.end_E), dy_PN.shape[1], x_PK.shape[1])
    out = torch.zeros(shape, dtype=torch.float32, device=dy_PN.device)
    for expert, rows in places.groups():
        out[expert] = dot(dy_PN[rows].mT, x_PK[rows].mT)
    return out


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
    """Rows of `x_ND` by index int64, where index N (one past the end) gives a zero row.

    The definition is `rows_of`; on NVIDIA GPUs a kernel where nobody asks for gradients.
    """
    if x_ND.is_cuda and has_triton() and not (torch.is_grad_enabled() and x_ND.requires_grad):
        from onegrid.ops import experts_triton

        return experts_triton.take(x_ND, index)
    return rows_of(x_ND, index)


def rows_of(x_ND: Tensor, index: Tensor) -> Tensor:
    """The definition of `take`."""
    return torch.cat((x_ND, x_ND.new_zeros(1, *x_ND.shape[1:])))[index]


def combine(y_NKD: Tensor, weight_NK: Tensor) -> Tensor:
    """FP32 sum over slots of weight times output, slot 0 first: [N, D]."""
    total = y_NKD[:, 0].float() * weight_NK[:, :1]
    for slot in range(1, y_NKD.shape[1]):
        total = total + y_NKD[:, slot].float() * weight_NK[:, slot : slot + 1]
    return total


def bring_back(y_PD: Tensor, places: Dispatch, weight_NK: Tensor, extra_ND: Tensor | None = None) -> Tensor:
    """Results of experts to their tokens: `combine` of them, FP32, plus `extra_ND`, then one rounding to BF16 [N, D].

    y_PD       BF16; places behind the last expert are not read
    weight_NK  FP32
    extra_ND   FP32, as of a shared expert
    """
    total = combine(Gather.apply(y_PD, places), weight_NK)
    return (total if extra_ND is None else total + extra_ND).to(torch.bfloat16)


def triton_bring_back(y_PD: Tensor, places: Dispatch, weight_NK: Tensor, extra_ND: Tensor | None = None) -> Tensor:
    """`bring_back` on NVIDIA GPUs: one kernel where nobody asks for gradients."""
    if torch.is_grad_enabled():
        return bring_back(y_PD, places, weight_NK, extra_ND)
    from onegrid.ops import experts_triton

    return experts_triton.bring_back(y_PD, places, weight_NK, extra_ND)
