"""What fixes the order of every sum: tile and chunk sizes, and the switches of the libraries below us.

A row's result may not depend on the rows around it. Libraries choose another kernel, and with it another order of
summation, when a matrix has few rows; so every matmul sees a multiple of TILE rows, and attention walks the keys in
chunks of CHUNK from position 0. `selftest` proves both on the device at hand.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

WORKSPACE = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
"""What torch must find in the environment at the first product on a GPU, or cuBLAS splits K for some shapes at few
rows. It looks once in a process."""

TILE = 16
"""Rows are padded to a multiple of this before every matmul."""

HEAD_TILE = 8
"""The same for the rows of attention: the query heads that share a key head, of all queries of a sequence."""

CHUNK = 32
"""Keys per attention chunk."""

GPU_CHUNK = 256
"""The same of the kernels for GPUs."""


def pin(device: torch.device | str = "cpu") -> None:
    """Sets the switches that fix the order of sums. Call once before the first matmul; cheap to repeat.

    On CUDA the workspace variables only count before the first product of the process, whoever asks for it; `self_test`
    names what suffers after that.
    """
    if torch.device(device).type == "cuda":
        os.environ.update(WORKSPACE)  # another library's value would change the order of sums
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if torch.device(device).type == "cpu":
        torch.set_flush_denormal(False)


def round_up(count: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def pad_rows(x_MK: Tensor, multiple: int = TILE) -> Tensor:
    """`x_MK` with zero rows appended on its second to last axis, up to a positive multiple of `multiple`.

    Returns the argument itself where nothing is missing.
    """
    num_rows = x_MK.shape[-2]
    padded = max(multiple, round_up(num_rows, multiple))
    if padded == num_rows:
        return x_MK
    return torch.nn.functional.pad(x_MK, (0, 0, 0, padded - num_rows))
