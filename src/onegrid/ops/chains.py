"""Chains of the decoder between two matmuls: residual and norm, head norm and rotation, the gated activation.

The functions without prefix are the definitions. Those named `triton_` run one kernel forward (`fused_triton`) and
have the definitions' gradients, in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onegrid.ops.activation import SwiGLU
from onegrid.ops.norm import norm_gradient, rms_norm
from onegrid.ops.rotary import rotate


def residual_norm(x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y rounded to BF16, and its RMSNorm: both BF16 [N, D]."""
    total = x_ND + y_ND
    return total, rms_norm(total, weight_D, eps)


def heads(
    q_NHD: Tensor,
    k_NGD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    position_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Norm of every head (where there are weights), then rotation: queries and keys, BF16.

    rope        FP32 tables [positions, D / 2] of cos and sin
    position_N  int64
    """
    cos_ND, sin_ND = rope[0][position_N], rope[1][position_N]
    if q_weight_D is not None and k_weight_D is not None:
        q_NHD, k_NGD = rms_norm(q_NHD, q_weight_D, eps), rms_norm(k_NGD, k_weight_D, eps)
    return rotate(q_NHD, cos_ND, sin_ND), rotate(k_NGD, cos_ND, sin_ND)


class TritonNorm(torch.autograd.Function):
    """`rms_norm` by one kernel."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Shapes as in `rms_norm`."""
        from onegrid.ops import fused_triton

        ctx.save_for_backward(x_ND, weight_D)
        ctx.eps = eps
        return fused_triton.norm(x_ND, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        """As `rms_norm`."""
        x_ND, weight_D = ctx.saved_tensors
        dx, dw = norm_gradient(dy_ND, x_ND, weight_D, _rstd(x_ND, ctx.eps))
        return dx.to(x_ND.dtype), dw.to(weight_D.dtype), None


class TritonResidualNorm(torch.autograd.Function):
    """`residual_norm` by one kernel."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Shapes as in `residual_norm`."""
        from onegrid.ops import fused_triton

        total, out = fused_triton.residual_norm(x_ND, y_ND, weight_D, eps)
        ctx.save_for_backward(total, weight_D)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal_ND: Tensor, dout_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The sum's gradient goes to both terms."""
        total, weight_D = ctx.saved_tensors
        dx, dw = norm_gradient(dout_ND, total, weight_D, _rstd(total, ctx.eps))
        # The definition rounds the norm's gradient before it meets the residual's.
        dx = dx.to(total.dtype) + dtotal_ND
        return dx, dx, dw.to(weight_D.dtype), None


class TritonHeads(torch.autograd.Function):
    """`heads` by one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_NGD: Tensor,
        q_weight_D: Tensor | None,
        k_weight_D: Tensor | None,
        eps: float,
        rope: tuple[Tensor, Tensor],
        position_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Shapes as in `heads`."""
        from onegrid.ops import fused_triton

        ctx.eps, ctx.rope = eps, rope
        ctx.save_for_backward(q_NHD, k_NGD, q_weight_D, k_weight_D, position_N)
        return fused_triton.heads(q_NHD, k_NGD, q_weight_D, k_weight_D, eps, rope, position_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Rotation back by the same angles, then the norm's gradient."""
        q_NHD, k_NGD, q_weight_D, k_weight_D, position_N = ctx.saved_tensors
        cos, sin = (table[position_N].unsqueeze(1) for table in ctx.rope)
        out: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        for x, weight, dy in ((q_NHD, q_weight_D, grads[0]), (k_NGD, k_weight_D, grads[1])):
            first, second = dy.float().chunk(2, dim=-1)
            dx = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
            dw = None
            if weight is not None:
                dx, dw = norm_gradient(dx.to(x.dtype), x, weight, _rstd(x, ctx.eps))
                dw = dw.to(weight.dtype)
            out.append(dx.to(x.dtype))
            weights.append(dw)
        return *out, *weights, None, None, None


class TritonSwiGLU(SwiGLU):
    """`swiglu` by one kernel, the same bytes."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up BF16 of one shape."""
        from onegrid.ops import fused_triton

        ctx.save_for_backward(gate, up)
        return fused_triton.swiglu(gate, up)


def triton_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` on NVIDIA GPUs."""
    return TritonNorm.apply(x_ND, weight_D, eps)


def triton_residual_norm(x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual_norm` on NVIDIA GPUs."""
    return TritonResidualNorm.apply(x_ND, y_ND, weight_D, eps)


def triton_heads(
    q_NHD: Tensor,
    k_NGD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    position_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """`heads` on NVIDIA GPUs."""
    return TritonHeads.apply(q_NHD, k_NGD, q_weight_D, k_weight_D, eps, rope, position_N)


def triton_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` on NVIDIA GPUs."""
    return TritonSwiGLU.apply(gate, up)


def _rstd(x_ND: Tensor, eps: float) -> Tensor:
    x = x_ND.float()
    return torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
