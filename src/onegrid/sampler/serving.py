"""What makes tokens, as opposed to what was loaded: the storage, tables, head and cache that a call would read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from onegrid.model.canonical import parts_of
from onegrid.model.live import LiveWeights

Addresses = dict[str, tuple[int, ...]]
"""By storage key, where the tensors lie that a matmul reads: the operand, codes and scales, or both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Of the embedded engine, read from what the next call would use."""

    proved: Addresses
    """What digests and derivations are about."""
    read: Addresses
    """What a call reads, that which was captured in graphs included where it is other storage."""
    tables: tuple[Tensor, ...]
    """cos and sin of every position, FP32 [positions, head_dim / 2]."""
    kv_cache: str
    """Format of keys and values."""
    logits: Callable[[Tensor], Tensor]
    """Hidden states BF16 [N, D] to FP32 [N, V]."""
    head_VD: Tensor
    """The tensor that logits should come from."""


def proved_addresses(weights: LiveWeights) -> Addresses:
    """Where the storage lies that was updated: operands that are kept, and codes and scales that kernels read."""
    return _addresses(weights, served=False)


def read_addresses(weights: LiveWeights) -> Addresses:
    """Where the storage lies that matmuls read: the same, unless something went astray."""
    return _addresses(weights, served=True)


def _addresses(weights: LiveWeights, *, served: bool) -> Addresses:
    """Codes and scales count where no operand is kept, and where a packed kernel reads them."""
    out: Addresses = {}
    for key, held in weights.held.items():
        kept = weights.operands.get(key)
        packed = {} if weights.packed is None else weights.packed.parts(key)
        found = [] if kept is None else [x for x in (kept.values, kept.row, kept.block) if x is not None]
        if kept is None or packed:
            found += (parts_of(held) | (packed if served else {})).values()
        out[key] = tuple(x.data_ptr() for x in found)
    return out
