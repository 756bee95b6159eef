"""The three matmuls of a linear layer on the grid, on one page.

    fprop   Y [M, N] = X [M, K]  W [N, K]^T     both quantized along K; W's codes are those the snapshot publishes
    dgrad   dX [M, K] = dY [M, N]  W [N, K]     contraction over N
    wgrad   dW [N, K] = dY [M, N]^T  X [M, K]   contraction over M, the tokens

    backward         dgrad operands                       wgrad operands
    quantized        dY along N, W along N (column-wise)  dY along M, X along M (column-wise)
    high_precision   dY and W in BF16                     dY and X in BF16
    dequantized      dY in BF16, W from its codes         dY in BF16, X from its codes

Column-wise operands come from the high-precision tensors, never from the row-wise codes. Quantization itself has the
straight-through gradient (Bengio et al., arXiv 1308.3432). All leading axes [E, ...] of stacked experts pass through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.ops.linear import dot, matmul
from onegrid.ops.operand import Operand, compute_dtype, dequantized, operand


@dataclass(slots=True)
class Input:
    """Activations shared by the linears that read them (q, k and v; gate and up), quantized once per direction."""

    x: Tensor
    """BF16 [..., M, K], detached."""
    rowwise: Operand
    quantizer: Quantizer | None
    columns: Operand | None = None

    def columnwise(self) -> Operand:
        """X along M: [..., K, M]."""
        if self.columns is None:
            self.columns = operand(self.x, self.quantizer, axis=-2)
        return self.columns


@dataclass(slots=True)
class Site:
    """One weight of one version: what the three matmuls need besides activations."""

    key: str
    rowwise: Operand
    """The live operand, derived from the published codes."""
    weight: Quantizer | None
    gradient: Quantizer | None
    backward: str
    """ "quantized", "high_precision" or "dequantized"; unquantized layers use "high_precision"."""
    calls: dict[str, int] = field(default_factory=dict)
    """How often each backward mode really ran, so that a mode that was asked for and ignored is seen."""


class GridLinear(torch.autograd.Function):
    """Y = X W^T on the grid, with the backward mode of its site. The table above is the whole definition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, bias: Tensor | None, shared: Input, site: Site) -> Tensor:
        """x BF16 [..., M, K]; master FP32 [..., N, K]; bias FP32 [N] holding BF16 values. Returns BF16 [..., M, N]."""
        ctx.shared, ctx.site, ctx.has_bias = shared, site, bias is not None
        ctx.save_for_backward(master)
        return matmul(shared.rowwise, site.rowwise, bias_N=bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dX BF16 [..., M, K], dW FP32 [..., N, K], db FP32 [N]."""
        (master,) = ctx.saved_tensors
        shared, site = ctx.shared, ctx.site
        site.calls[site.backward] = site.calls.get(site.backward, 0) + 1
        if site.backward == "quantized":
            weight_KN = operand(master.to(torch.bfloat16), site.weight, axis=-2)
            dx = matmul(operand(dy, site.gradient), weight_KN)
            dw = matmul(operand(dy, site.gradient, axis=-2), shared.columnwise(), out_dtype=torch.float32)
        else:
            dtype = compute_dtype(dy.device)
            if site.backward == "dequantized":
                w, x = dequantized(site.rowwise), dequantized(shared.rowwise)
            else:
                w, x = master.to(torch.bfloat16).to(dtype), shared.x.to(dtype)
            dx = dot(dy.to(dtype), w.mT).to(dy.dtype)
            dw = dot(dy.to(dtype).mT, x.mT)
        db = dy.float().sum(dim=tuple(range(dy.dim() - 1))) if ctx.has_bias else None
        return dx, dw, db, None, None
