"""The grid of a quantized key/value cache, applied by the decoder on both sides: they attend to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import E4M3
from onegrid.formats.casts import decode_elements, encode_elements


class RoundToE4M3(torch.autograd.Function):
    """E4M3 with scale 1, saturating at 448; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """BF16 in, BF16 out: every E4M3 value is exact in BF16."""
        return decode_elements(encode_elements(x.float(), E4M3), E4M3).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Identity."""
        return dy


def kv_grid(kind: str) -> Callable[[Tensor], Tensor] | None:
    """None for "bf16", the rounding for "fp8". Raises CapabilityError for another kind."""
    if kind == "bf16":
        return None
    if kind == "fp8":
        return RoundToE4M3.apply
    raise CapabilityError(f"key/value cache {kind!r} is not known; bf16 or fp8")
