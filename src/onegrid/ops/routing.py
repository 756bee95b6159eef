"""Which experts a token visits: FP32 logits, softmax, top-k with ties to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.ops.pins import pad_rows


def route(x_ND: Tensor, router_ED: Tensor, *, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Expert ids int64 [N, k], largest probability first, and their FP32 combine weights [N, k].

    x_ND       BF16; router_ED BF16 or FP32 holding BF16 values
    normalize  divide the kept probabilities by their sum (`norm_topk_prob`)
    Differentiable in x and router through the weights. NaN in a row gives NaN weights in that row.
    """
    num_rows = x_ND.shape[0]
    logits = (pad_rows(x_ND.float()) @ router_ED.float().mT)[:num_rows]
    probability_NE = torch.softmax(logits, dim=-1)
    # A stable sort keeps the lower index first among equals; the library's top-k promises no order.
    expert_NK = torch.sort(probability_NE.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight_NK = probability_NE.gather(1, expert_NK)
    if normalize:
        total = weight_NK[:, :1]
        for slot in range(1, top_k):
            total = total + weight_NK[:, slot : slot + 1]
        weight_NK = weight_NK / total
    return expert_NK, weight_NK
