"""The random Hadamard transform of NVFP4 weight-gradient operands: it spreads outliers over 16 elements.

Both operands of the matmul are transformed along the contraction axis; the transform is orthogonal, so the exact
product stays the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.errors import FormatError

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of the rule; one fixed draw, the same on both operands."""


def hadamard(x: Tensor, axis: int = -2) -> Tensor:
    """Every 16 consecutive elements v along `axis` become v @ R with R = diag(SIGNS) H16 / 4, rounded to BF16.

    x     [..., M, K], BF16 or wider (rounded to BF16 first); the length of `axis` must be a multiple of 16.
    axis  the contraction axis, -1 or -2 (the rule transforms column-wise operands only).
    Returns BF16. Products are exact and summed in FP32, first element first. NaN and Inf spoil their 16 elements.
    The amax of an NVFP4 operand is taken after the transform. Source: Transformer Engine 2.20.
    """
    if axis not in (-1, -2):
        raise FormatError(f"hadamard: axis {axis}; the contraction axis is -1 or -2")
    if x.shape[axis] % 16:
        raise FormatError(f"hadamard: {x.shape[axis]} elements along axis {axis}; a multiple of 16 is needed")
    v_NG = x.transpose(-1, axis).bfloat16().float().unflatten(-1, (x.shape[axis] // 16, 16))
    matrix_GG = rotation(x.device)
    out_NG = v_NG[..., :1] * matrix_GG[0]
    for g in range(1, 16):  # products are exact (a power of two), so a multiply-add gives the same sums
        out_NG = out_NG + v_NG[..., g : g + 1] * matrix_GG[g]
    return out_NG.flatten(-2).transpose(-1, axis).bfloat16()


def rotation(device: torch.device | str = "cpu") -> Tensor:
    """R, FP32 [16, 16]: entries +-1/4, R R^T = 1."""
    h = torch.ones(1, 1, device=device)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return torch.tensor(SIGNS, dtype=torch.float32, device=device)[:, None] * h / 4
