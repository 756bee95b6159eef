"""Rotary position embedding, FP32, rounded once to BF16. Su et al., arXiv 2104.09864."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Rotates the two halves of each head by the angles of its position (the "half" pairing of Hugging Face).

    x_NHD BF16; cos_ND, sin_ND FP32 [N, D / 2]. Each product is rounded before the sum: no fused multiply-add.
    """
    first, second = x_NHD.float().chunk(2, dim=-1)
    cos, sin = cos_ND.unsqueeze(1), sin_ND.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(torch.bfloat16)
