"""A 64-bit digest that identifies a tensor's bytes and adds up over pieces.

Every byte adds weight(position) * (byte + 1) modulo 2^64, where the position is that of the byte in the canonical
tensor and weights are odd pseudo-random numbers. So buckets and shards of any size, in any order, sum to the whole;
one changed byte always changes the sum (an odd weight times a number below 256 is never 0), other changes slip
through with probability about 2^-57. It finds faults; it does not resist an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.formats.quantize import QuantTensor

MASK = (1 << 64) - 1
CHUNK = 1 << 14
UNIT = 256
SMALL = 4 * UNIT
GROUP = 64
"""Chunks that are computed together on a CPU."""
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
        return sum(digests([(part, name) for name, part in parts.items() if part is not None])) & MASK
    data = _bytes(tensor)
    if not data.numel():
        return 0
    if data.device.type == "cpu":
        return _on_cpu(data, start, role)
    total, at = 0, 0
    table = _weights(data.device)
    lead = -start % CHUNK
    if lead:
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


def digests(parts: Sequence[tuple[Tensor, str]]) -> list[int]:
    """`digest` of many tensors with their roles; on a CPU small ones go together, which is much faster."""
    out = [0] * len(parts)
    for width in (SMALL, CHUNK):
        lower = 0 if width == SMALL else SMALL
        fitting = [i for i, (x, _) in enumerate(parts) if lower < x.nbytes <= width and x.device.type == "cpu"]
        for first in range(0, len(fitting), GROUP):
            group = fitting[first : first + GROUP]
            data_CN = torch.zeros(len(group), width, dtype=torch.uint8)
            for row, i in enumerate(group):
                data_CN[row, : parts[i][0].nbytes] = _bytes(parts[i][0])
            for i, value in zip(group, _chunk_sums(data_CN), strict=True):
                x, role = parts[i]
                out[i] = _chunk_weight(0, role) * (value + _prefixes()[x.nbytes]) & MASK
    for i, (x, role) in enumerate(parts):
        if x.nbytes > CHUNK or x.device.type != "cpu":
            out[i] = digest(x, role=role)
    return out


def _on_cpu(data: Tensor, start: int, role: str) -> int:
    """The same sum by FP32 matmuls, which are exact here; see `_chunk_sums`."""
    total, first, offset = 0, start // CHUNK, start % CHUNK
    prefixes = _prefixes()
    while data.numel():
        taken = min(data.numel(), GROUP * CHUNK - offset)
        end = offset + taken
        width = CHUNK if end > CHUNK else -(-end // UNIT) * UNIT
        rows = -(-end // width)
        padded = data[:taken]
        if offset or end != rows * width:
            padded = torch.zeros(rows * width, dtype=torch.uint8)
            padded[offset:end] = data[:taken]
        for i, value in enumerate(_chunk_sums(padded.view(rows, width))):
            low, high = (offset if i == 0 else 0), min(CHUNK, end - i * CHUNK)
            total += _chunk_weight(first + i, role) * (value + prefixes[high] - prefixes[low])
        data, first, offset = data[taken:], first + rows, 0
    return total & MASK


def _chunk_sums(data_CN: Tensor) -> list[int]:
    """Sum of weight times byte modulo 2^64 of each row of uint8 [C, N], N a multiple of UNIT up to CHUNK.

    Weights are cut into eight bytes. A partial sum of UNIT = 256 products of two bytes is at most 256 * 255 * 255,
    below 2^24, so FP32 holds it exactly, in any order of additions.
    """
    num_chunks, width = data_CN.shape
    units = width // UNIT
    x_UNC = data_CN.to(torch.float32).view(num_chunks, units, UNIT).permute(1, 2, 0)
    sums_U8C = torch.bmm(_limbs()[:units], x_UNC)
    return (sums_U8C.to(torch.int64) * _shifts()).sum(dim=(0, 1)).tolist()


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


@lru_cache(maxsize=1)
def _prefixes() -> list[int]:
    """Sum of the first n weights of a chunk, n = 0 .. CHUNK; not reduced."""
    return [0, *accumulate(w & MASK for w in _weights(torch.device("cpu")).tolist())]


@lru_cache(maxsize=1)
def _limbs() -> Tensor:
    """FP32 [units, 8, UNIT]: the bytes of the weights, lowest first."""
    table = _weights(torch.device("cpu")).view(torch.uint8)
    return table.view(-1, UNIT, 8).mT.to(torch.float32).contiguous()


@lru_cache(maxsize=1)
def _shifts() -> Tensor:
    return torch.tensor([1 << (8 * i) for i in range(8)], dtype=torch.int64)[:, None]
