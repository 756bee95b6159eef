"""The order in which `packed.cu` reads few rows, and where kernels that make activations write it beside the rows.

For every 16 k all rows' even and then all rows' odd ones: number k of row m lies at
[k // 16, k % 2, m, k % 16 // 2] of [K / 16, 2, M, 8].
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ROWS = 64
"""Of our matmuls of few rows, packed or BF16."""


def is_for(device: torch.device) -> bool:
    """Whether packed matmuls run there: on GPUs of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def arranged(x_MK: Tensor) -> Tensor:
    """Rows [M, K] in that order, K a multiple of 16; the definition, for rows that came without."""
    num_rows, depth = x_MK.shape
    return x_MK.reshape(num_rows, depth // 16, 8, 2).permute(1, 3, 0, 2).reshape(num_rows, depth)


def room(x_MK: Tensor) -> Tensor | None:
    """Memory for BF16 rows [M, K] in that order, where a packed matmul may read them, else None.

    That is for whole tiles of 16 rows up to MOST_ROWS, K of whole steps, where `is_for`.
    """
    num_rows, depth = x_MK.shape
    few = 0 < num_rows <= MOST_ROWS and num_rows % 16 == 0 and depth % 16 == 0
    return x_MK.new_empty(num_rows, depth, dtype=torch.bfloat16) if few and is_for(x_MK.device) else None
