"""RMSNorm, the same bits for a row whatever rows stand beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """y = x * rsqrt(mean(x^2) + eps) * w in FP32, rounded once to BF16. Zhang and Sennrich, arXiv 1910.07467."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x_ND BF16 [..., D]; weight_D FP32 or BF16 holding BF16 values."""
        x = x_ND.float()
        rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
        ctx.save_for_backward(x_ND, weight_D, rstd)
        return ((x * rstd) * weight_D.float()).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        """dx = rstd (dy w - x^ mean(dy w x^)), dw = sum over rows of dy x^, with x^ = x rstd; FP32."""
        x_ND, weight_D, rstd = ctx.saved_tensors
        dx, dw = norm_gradient(dy_ND, x_ND, weight_D, rstd)
        return dx.to(x_ND.dtype), dw.to(weight_D.dtype), None


def norm_gradient(dy_ND: Tensor, x_ND: Tensor, weight_D: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dw in FP32 for y = x rstd w; rstd FP32 [..., 1]."""
    dy, unit = dy_ND.float(), x_ND.float() * rstd
    scaled = dy * weight_D.float()
    mean = (scaled * unit).mean(-1, keepdim=True)
    dw = (dy * unit).reshape(-1, x_ND.shape[-1]).sum(0)
    return scaled.sub_(unit.mul_(mean)).mul_(rstd), dw


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: BF16 in, BF16 out. A zero row gives zeros; NaN stays in its row."""
    return RMSNorm.apply(x_ND, weight_D, eps)
