"""Gradients of stacked experts: the table of `grid_linear`, all experts in one matmul a direction.

Experts start at multiples of the largest block along tokens, so that one column-wise quantization of all places has
the blocks that each expert would have alone. Formats with a number that spans an expert's rows or columns (FP8 by
tensor or row, FP8 blocks with FP32 scales) go expert by expert, which a GPU waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.ops.grouped import grouped_matmul, grouped_wgrad
from onegrid.ops.operand import Operand, compute_dtype, dequantized, operand

if TYPE_CHECKING:
    from onegrid.learner.grid_linear import Input, Site


def in_one(activation: Quantizer | None, site: Site) -> bool:
    """Whether the quantized backward can take all experts at once."""
    return all(q is None or q.matmul == "decoded" for q in (activation, site.weight, site.gradient))


def expert_gradients(
    dy: Tensor, master: Tensor, shared: Input, site: Site, *, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """dX BF16 [P, K] and, of trained weights, dW FP32 [E, N, K]; rows of dX that belong to no expert are undefined.

    dy BF16 [P, N]; master FP32 [E, N, K]
    """
    assert shared.places is not None
    site.count(site.backward)
    if site.backward == "quantized":
        weight_EKN = operand(master.to(torch.bfloat16), site.weight, axis=-2)
        dx = grouped_matmul(operand(dy, site.gradient), weight_EKN, shared.places)
        if not trained:
            return dx, None
        columns, dy_NP = shared.columnwise(None, slice(None)), operand(dy, site.gradient, axis=-2)
        return dx, grouped_wgrad(dy_NP.values.mT, columns.values.mT, shared.places)
    if site.backward == "dequantized":
        w, x = dequantized(site.published()), dequantized(shared.rowwise)
    else:
        dtype = compute_dtype(dy.device)
        w, x = master.to(torch.bfloat16).to(dtype), shared.x.to(dtype)
    dy = dy.to(w.dtype)
    dx = grouped_matmul(Operand(dy), Operand(w.mT), shared.places)
    return dx, grouped_wgrad(dy, x, shared.places) if trained else None
