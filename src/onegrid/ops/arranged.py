"""The order in which `packed.cu` reads few rows, and where kernels that make activations write it beside the rows.

For every 16 k all rows' even and then all rows' odd ones: number k of row m lies at
[k // 16, k % 2, m, k % 16 // 2] of [K / 16, 2, M, 8]. `arrange.cu` makes it of rows that came without.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ROWS = 64
"""Of a packed matmul."""


def room(x_MK: Tensor) -> Tensor | None:
    """Memory for BF16 rows [M, K] in that order, where a packed matmul may read them, else None.

    That is on a GPU of compute capability 9.0 for whole tiles of 16 rows up to MOST_ROWS, K of whole steps.
    """
    num_rows, depth = x_MK.shape
    few = 0 < num_rows <= MOST_ROWS and num_rows % 16 == 0 and depth % 16 == 0
    if not few or not x_MK.is_cuda or torch.cuda.get_device_capability(x_MK.device) != (9, 0):
        return None
    return x_MK.new_empty(num_rows, depth, dtype=torch.bfloat16)
