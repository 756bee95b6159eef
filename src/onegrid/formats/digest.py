"""A 64-bit digest that identifies a tensor's bytes and adds up over pieces.

Every byte adds weight(position) * (byte + 1) modulo 2^64, where the position is that of the byte in the canonical
tensor and weights are odd pseudo-random numbers. So buckets and shards of any size, in any order, sum to the whole;
one changed byte always changes the sum (an odd weight times a number below 256 is never 0), other changes slip
through with probability about 2^-57. It finds faults; it does not resist an adversary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.formats.quantize import QuantTensor

MASK = (1 << 64) - 1
CHUNK = 1 << 14
ROLES = ("values", "codes", "scales", "amax")
"""Parts of a tensor; each has its own weights, so that bytes cannot move between parts unseen."""


def digest(tensor: Tensor | QuantTensor, *, start: int = 0, role: str = "values") -> int:
    """Unsigned 64-bit digest of the bytes of a tensor in row-major order, or of codes, scales and amax together.

    start  position (bytes) of the first byte in the canonical tensor; for pieces.
    role   which part a plain tensor is: "values", "codes", "scales" or "amax". The digest of a QuantTensor is the sum
           of those of its parts.
    """
    if isinstance(tensor, QuantTensor):
        parts = {"codes": tensor.codes, "scales": tensor.scales, "amax": tensor.amax}
        return sum(digest(part, role=name) for name, part in parts.items() if part is not None) & MASK
    data = _bytes(tensor)
    total, at = 0, 0
    table = _weights(data.device)
    lead = -start % CHUNK
    if lead and data.numel():
        head = data[:lead]
        offset = start % CHUNK
        total += _chunk_weight(start // CHUNK, role) * int(_weighted(head, table[offset : offset + head.numel()]))
        at = head.numel()
    while at < data.numel():
        group = data[at : at + 256 * CHUNK]
        whole = group.numel() // CHUNK * CHUNK
        first = (start + at) // CHUNK
        sums = ((group[:whole].view(-1, CHUNK).to(torch.int64) + 1) * table).sum(-1).tolist()
        if whole < group.numel():
            sums.append(int(_weighted(group[whole:], table[: group.numel() - whole])))
        total += sum(_chunk_weight(first + i, role) * value for i, value in enumerate(sums))
        at += group.numel()
    return total & MASK


def digest_rows(tensor: Tensor, *, start: int = 0, role: str = "values") -> list[int]:
    """One digest per row of the last axis; they sum to `digest(tensor)` modulo 2^64. To find which rows differ."""
    width = (tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size()
    rows = _bytes(tensor).split(width) if tensor.numel() else ()
    return [digest(row, start=start + i * width, role=role) for i, row in enumerate(rows)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _weighted(data: Tensor, weights: Tensor) -> Tensor:
    return ((data.to(torch.int64) + 1) * weights).sum()


def _mix(number: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


@lru_cache(maxsize=1 << 16)
def _chunk_weight(chunk: int, role: str) -> int:
    if role not in ROLES:
        raise FormatError(f"role {role!r}; allowed are {', '.join(ROLES)}")
    return _mix(_mix(chunk) ^ ROLES.index(role)) | 1


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    weights = [_mix(i) | 1 for i in range(CHUNK)]
    return torch.tensor([w - (1 << 64) if w >> 63 else w for w in weights], dtype=torch.int64, device=device)
