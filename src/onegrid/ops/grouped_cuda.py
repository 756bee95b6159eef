"""Matmuls of experts on NVIDIA GPUs, over places whose bounds only the device knows: no host read, so capturable.

    decoded operands, rows of whole 16 bytes    the library's grouped matmul, BF16 out
    everything else                             `grouped_triton`: FP32 sums, the factors of the format, one rounding

Which of the two it is depends on the operands' kind and on the shape of a weight, never on the number of rows, so
learner and sampler, prefill and decode take the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.ops.grouped import Dispatch
from onegrid.ops.operand import Operand


def in_library(a: Operand, b: Operand) -> bool:
    """Whether the library's grouped matmul covers the operands."""
    strides = (*a.values.stride(), *b.values.stride())
    aligned = all(stride == 1 or stride % 8 == 0 for stride in strides) and all(
        size % 8 == 0 for size in b.values.shape[-2:]
    )
    return a.kind == b.kind == "decoded" and aligned and torch.cuda.get_device_capability(a.values.device) >= (9, 0)


def grouped_matmul(a: Operand, b: Operand, places: Dispatch) -> Tensor:
    """`grouped.grouped_matmul`; places behind the last expert are undefined. Raises FormatError where K differs."""
    if a.values.shape[-1] != b.values.shape[-1]:
        raise FormatError(f"operands do not fit: {tuple(a.values.shape)} and {tuple(b.values.shape)}; both end in K")
    if in_library(a, b):
        return library_grouped(a, b, places)
    return triton_grouped(a, b, places)


def library_grouped(a: Operand, b: Operand, places: Dispatch) -> Tensor:
    """By `torch._grouped_mm`: FP32 sums, rounded to BF16."""
    return torch._grouped_mm(a.values, b.values.mT, offs=places.end_E)


def triton_grouped(a: Operand, b: Operand, places: Dispatch) -> Tensor:
    """By own kernels: every kind and shape."""
    from onegrid.ops import grouped_triton

    return grouped_triton.grouped_matmul(a, b, places)


def grouped_wgrad(dy_PN: Tensor, x_PK: Tensor, places: Dispatch) -> Tensor:
    """`grouped.grouped_wgrad`. The library has it with BF16 out only, which would round every micro-batch's part."""
    from onegrid.ops import grouped_triton

    return grouped_triton.grouped_wgrad(dy_PN, x_PK, places)
