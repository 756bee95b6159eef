"""SwiGLU and the sigmoid gate, written with exp only.

On a CPU the library's silu and sigmoid give other bits in the last elements of a buffer than in its middle, because a
vector remainder takes a scalar path; exp, division and multiplication do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), FP32. -Inf gives 0, +Inf gives 1, NaN stays."""
    return 1.0 / (1.0 + torch.exp(-x))


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up in FP32, rounded once to BF16. Shazeer, arXiv 2002.05202."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up BF16 of one shape."""
        ctx.save_for_backward(gate, up)
        g = gate.float()
        return ((g / (1.0 + torch.exp(-g))) * up.float()).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """d silu(g) / dg = s (1 + g (1 - s)) = s + silu (1 - s) with s the sigmoid of g."""
        gate, up = ctx.saved_tensors
        g, u, d = gate.to(torch.float32, copy=True), up.float(), dy.float()
        s = sigmoid(g)
        silu = g.mul_(s)
        dup = silu * d
        dgate = torch.addcmul(silu, silu, s, value=-1.0).add_(s).mul_(d).mul_(u)  # s + silu - silu s
        return dgate.to(gate.dtype), dup.to(up.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: BF16 in, BF16 out. Zeros give zeros."""
    return SwiGLU.apply(gate, up)
