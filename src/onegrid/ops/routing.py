"""Which experts a token visits: FP32 logits, softmax, top-k with ties to the lower index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onegrid.ops.linear import dot
from onegrid.ops.operand import compute_dtype
from onegrid.ops.pins import pad_rows


class NarrowLinear(torch.autograd.Function):
    """FP32 sums of a BF16 input and a matrix of few rows that stays unquantized: a router, a shared expert's gate."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        """x BF16 [N, D], weight FP32 or BF16 holding BF16 values [E, D]: FP32 [N, E], not rounded."""
        ctx.save_for_backward(x_ND, weight_ED)
        dtype = compute_dtype(x_ND.device)
        return dot(pad_rows(x_ND.to(dtype)), weight_ED.to(dtype))[: len(x_ND)]

    @staticmethod
    def backward(ctx: Any, dlogit_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Both in FP32, rounded to the dtype of what they belong to."""
        x_ND, weight_ED = ctx.saved_tensors
        dx = (dlogit_NE @ weight_ED.float()).to(x_ND.dtype)
        return dx, (dlogit_NE.mT @ x_ND.float()).to(weight_ED.dtype)


def route(
    x_ND: Tensor, router_ED: Tensor, *, top_k: int, normalize: bool, forced_NK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Expert ids int64 [N, k], largest probability first, their FP32 combine weights [N, k], and the ids found here.

    x_ND       BF16; router_ED BF16 or FP32 holding BF16 values
    normalize  divide the kept probabilities by their sum (`norm_topk_prob`)
    forced_NK  recorded ids to take instead, -1 where nothing was recorded
    Differentiable in x and router through the weights. NaN in a row gives NaN weights in that row.
    """
    probability_NE = _probabilities(x_ND, router_ED)
    # A stable sort keeps the lower index first among equals; the library's top-k promises no order.
    found_NK = torch.sort(probability_NE.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    expert_NK = found_NK if forced_NK is None else torch.where(forced_NK < 0, found_NK, forced_NK.to(torch.int64))
    weight_NK = probability_NE.gather(1, expert_NK)
    if normalize:
        total = weight_NK[:, :1]
        for slot in range(1, top_k):
            total = total + weight_NK[:, slot : slot + 1]
        weight_NK = weight_NK / total
    return expert_NK, weight_NK, found_NK


def triton_route(
    x_ND: Tensor, router_ED: Tensor, *, top_k: int, normalize: bool, forced_NK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` on NVIDIA GPUs: one kernel behind the softmax where nobody asks for gradients and nothing is forced."""
    if torch.is_grad_enabled() or forced_NK is not None:
        return route(x_ND, router_ED, top_k=top_k, normalize=normalize, forced_NK=forced_NK)
    from onegrid.ops import experts_triton

    expert_NK, weight_NK = experts_triton.choose(_probabilities(x_ND, router_ED), top_k=top_k, normalize=normalize)
    return expert_NK, weight_NK, expert_NK


def _probabilities(x_ND: Tensor, router_ED: Tensor) -> Tensor:
    return torch.softmax(NarrowLinear.apply(x_ND, router_ED), dim=-1)
