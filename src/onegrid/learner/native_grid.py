"""Gradients of a linear whose products are the matrix unit's own FP8 ones: the "quantized" row of `grid_linear`.

    dgrad   dY in blocks along N     W's published codes, transposed: tiles of 128 x 128 read the same both ways
    wgrad   dY in blocks along M     X in blocks along M, made in the pass that made those of the forward

With one scale per tensor, both transposes are of the codes of the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.ops.native import native_matmul, native_operand, native_operands
from onegrid.ops.operand import Operand

if TYPE_CHECKING:
    from onegrid.learner.grid_linear import Input, Site


def native_inputs(x: Tensor, quantizer: Quantizer, *, columns: bool) -> tuple[Operand, Operand | None]:
    """Activations BF16 [M, K] for the forward and, where `columns`, for wgrad."""
    return native_operands(x, quantizer) if columns else (native_operand(x, quantizer), None)


def native_gradients(dy: Tensor, shared: Input, site: Site, *, trained: bool) -> tuple[Tensor, Tensor | None]:
    """dX BF16 [M, K] and, of a trained weight, dW FP32 [N, K]. dy BF16 [M, N]; M a multiple of 128 for blocks."""
    assert site.gradient is not None
    site.count("quantized")
    assert site.transposed is not None
    weight_KN = site.transposed
    if not trained:
        return native_matmul(native_operand(dy, site.gradient), weight_KN), None
    dy_MN, dy_NM = native_operands(dy, site.gradient)
    dw = native_matmul(dy_NM, shared.columns[None], out_dtype=torch.float32)
    return native_matmul(dy_MN, weight_KN), dw
