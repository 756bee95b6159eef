"""Weights as they are published: canonical tensors, their parts and bytes, and the snapshot of a version.

Canonical names and these parts are all that crosses from learner to sampler; layouts belong to the receiver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.formats import QuantTensor, count_true

Canonical = QuantTensor | Tensor
"""Codes and scales, or the values of a tensor that is not quantized."""

_PLAIN = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Weights of one version. Tensors may be views of live storage: send it before the next update."""

    version: int
    plan_digest: str
    tensors: dict[str, Canonical]
    """By canonical name, quantized by the plan as the sampler holds them."""


def parts_of(canonical: Canonical) -> dict[str, Tensor]:
    """ "codes", "scales" and, where the format has one, "amax"; or "values"."""
    if isinstance(canonical, Tensor):
        return {"values": canonical}
    parts = {"codes": canonical.codes, "scales": canonical.scales}
    return parts if canonical.amax is None else parts | {"amax": canonical.amax}


def format_of(canonical: Canonical) -> str:
    """Name of the quantizer, or "bf16" or "fp32" for a plain tensor."""
    return _PLAIN[canonical.dtype] if isinstance(canonical, Tensor) else canonical.quantizer.name


def raw_bytes(x: Tensor) -> Tensor:
    """uint8 view, one axis, of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


def dtype_name(x: Tensor) -> str:
    """ "uint8" for torch.uint8 and so on."""
    return str(x.dtype).removeprefix("torch.")


def count_moved(before: Canonical, after: Tensor) -> tuple[Tensor, int]:
    """Elements whose code, or plain value, differs as bytes, int64 of shape () on their device; and elements in all.

    after  codes or values, shape and dtype of those of `before`
    """
    first = before if isinstance(before, Tensor) else before.codes
    count = math.prod(before.shape)
    if isinstance(before, QuantTensor) and first.numel() < count:  # two codes to a byte
        xor = first ^ after
        return count_true((xor & 15) != 0) + count_true((xor >> 4) != 0), count
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    return count_true(first.view(words) != after.view(words)), count
