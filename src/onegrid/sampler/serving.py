"""What makes tokens, as opposed to what was loaded: the storage, tables, head and cache that a call would read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from onegrid.ops.operand import Operand

Addresses = dict[str, tuple[int, ...]]
"""By storage key, where the tensors of an operand lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Of the embedded engine, read from what the next call would use."""

    proved: Addresses
    """Operands that digests and derivations are about."""
    read: Addresses
    """Operands that a call reads, those that were captured in graphs included where they are others."""
    tables: tuple[Tensor, ...]
    """cos and sin of every position, FP32 [positions, head_dim / 2]."""
    kv_cache: str
    """Format of keys and values."""
    logits: Callable[[Tensor], Tensor]
    """Hidden states BF16 [N, D] to FP32 [N, V]."""
    head_VD: Tensor
    """The tensor that logits should come from."""


def addresses_of(operands: Mapping[str, Operand]) -> Addresses:
    """Where operands lie."""
    return {
        key: tuple(x.data_ptr() for x in (o.values, o.row, o.block) if x is not None) for key, o in operands.items()
    }
