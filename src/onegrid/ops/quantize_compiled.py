"""Quantize and decode of activations as one compiled kernel on NVIDIA GPUs, with the bytes of the eager definition.

Eager, the definition is some twenty kernels, and a decode step waits for launches only. Both sides call this one
callable; what compilers do to divisions and casts is met in `formats.casts`, and the test compares bytes.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, Quantizer, quantize_decode

SMALLEST = 512
"""Rows narrower than this are not worth the seconds of compilation: tests, toys."""


def worth_compiling(x: Tensor, quantizer: Quantizer, axis: int) -> bool:
    """Whether `compiled_decode` covers the case: wide rows on a GPU with Triton, a known quantizer, whole blocks.

    A last block that is not whole is padded, and there torch 2.11's compiler zeroes it (measured: MXFP8 along 48 rows).
    """
    block = quantizer.block if axis == -1 else quantizer.block[::-1]
    return (
        x.is_cuda
        and x.dim() == 2
        and x.shape[-1] >= SMALLEST
        and x.shape[0] > 1
        and all(size is None or extent % size == 0 for extent, size in zip(x.shape, block, strict=True))
        and QUANTIZERS.get(quantizer.name) is quantizer
        and has_triton()
    )


@lru_cache
def has_triton() -> bool:
    """Whether the compiler of GPU kernels is installed."""
    return importlib.util.find_spec("triton") is not None


def compiled_decode(x_MK: Tensor, quantizer: Quantizer, axis: int) -> tuple[Tensor, Tensor | None]:
    """BF16 values (exact) and amax of `quantize_decode`; any number of rows without another compilation."""
    from torch import _dynamo

    with torch.no_grad():
        x_MK = x_MK.detach()
        _dynamo.maybe_mark_dynamic(x_MK, 0)
        return _compiled()(x_MK, quantizer.name, axis)


@lru_cache
def _compiled() -> Any:
    from torch import _dynamo

    config: Any = _dynamo.config
    config.recompile_limit = max(config.recompile_limit, 256)  # one program for each width, format and axis
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 1024)
    return torch.compile(_decode)


def _decode(x_MK: Tensor, name: str, axis: int) -> tuple[Tensor, Tensor | None]:
    q = quantize_decode(x_MK, QUANTIZERS[name], axis)
    # Every NaN becomes the one that the eager cast gives on the chip; compiled code gives another.
    bits = torch.where(q.values.isnan(), 0x7FFF, q.values.to(torch.bfloat16).view(torch.int16))
    return bits.to(torch.int16).view(torch.bfloat16), q.amax
