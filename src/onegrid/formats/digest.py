"""A 64-bit digest that identifies a tensor's bytes and adds up over pieces.

Bytes are read in words of 32 bits, every second of them as a signed number, so that two words are one 64-bit integer;
every word adds weight(position) times its value modulo 2^64, and every byte that is there its word's weight once more.
Weights are odd pseudo-random numbers of the position in the canonical tensor. So a byte's share depends on nothing but
its position and value: buckets and shards of any size, in any order, sum to the whole. One changed byte always changes
the sum (an odd weight times a number below 2^32 is never 0 modulo 2^64); any other change slips through with
probability 2^-56, or, where only the highest byte of words changes, 2^-32. It finds faults; it does not resist an
adversary.

Only integers are added, modulo 2^64, so the order does not matter, and every device gives the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.formats.quantize import QuantTensor

MASK = (1 << 64) - 1
CHUNK = 1 << 14
"""Bytes whose words have weights of their own; those of chunk n are multiplied by one more weight."""
PAIRS = CHUNK // 8
GROUP = 64
"""Chunks that are computed together on a CPU, so that they stay in its cache."""
TOGETHER = 1 << 9
"""Chunks of small tensors that a GPU computes together: 8 MiB, and some 32 in between."""
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
    return (sum(_to_host(_device_sums(data, start, role))) + _present(start, data.numel(), role)) & MASK


def digests(parts: Sequence[tuple[Tensor, str]]) -> list[int]:
    """`digest` of many tensors with their roles; small ones go together, and a GPU is waited for only once."""
    out = [0] * len(parts)
    by_size: dict[int, list[int]] = {}
    for i, (x, _) in enumerate(parts):
        if x.device.type == "cpu" and 0 < x.nbytes <= CHUNK:
            by_size.setdefault(x.nbytes, []).append(i)
    for num_bytes, group in by_size.items():
        data_CN = torch.stack([_bytes(parts[i][0]) for i in group])
        if num_bytes % 8:
            data_CN = torch.nn.functional.pad(data_CN, (0, -num_bytes % 8))
        for i, value in zip(group, chunk_sums(data_CN).tolist(), strict=True):
            out[i] = _chunk_weight(0, parts[i][1]) * value
    waiting: dict[torch.device, list[int]] = {}
    for i, (x, _) in enumerate(parts):
        if x.nbytes > CHUNK or (x.nbytes and x.device.type != "cpu"):
            waiting.setdefault(x.device, []).append(i)
    for device, owners in waiting.items():
        pieces = [(i, parts[i][1], _bytes(parts[i][0])) for i in owners]
        for i, value in _in_place(pieces) if device.type == "cpu" else _in_few_launches(pieces):
            out[i] += value
    return [(value + _present(0, x.nbytes, role)) & MASK for value, (x, role) in zip(out, parts, strict=True)]


def digest_rows(tensor: Tensor, *, start: int = 0, role: str = "values") -> list[int]:
    """One digest per row of the last axis; they sum to `digest(tensor)` modulo 2^64. To find which rows differ."""
    width = (tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size()
    rows = _bytes(tensor).split(width) if tensor.numel() else ()
    return [digest(row, start=start + i * width, role=role) for i, row in enumerate(rows)]


def chunk_sums(data_CN: Tensor) -> Tensor:
    """Sum of weight times word modulo 2^64 of each row of uint8 [C, N], N a multiple of 8 up to CHUNK: int64 [C].

    With x = low + high 2^32 and weights a, b: low a + high b = x a + (x >> 32) (b - a 2^32), two exact products.
    """
    x_CP = data_CN.view(torch.int64)
    low, high = (weights[: x_CP.shape[1]] for weights in pair_weights(data_CN.device))
    if data_CN.device.type != "cpu":
        return (x_CP * low + (x_CP >> 32) * high).sum(-1)
    out = torch.empty(len(x_CP), dtype=torch.int64)
    for rows in range(0, len(x_CP), GROUP):
        part = x_CP[rows : rows + GROUP]
        out[rows : rows + GROUP] = torch.mv(part, low) + torch.mv(part >> 32, high)
    return out


def weighted_sum(data_CN: Tensor, weight_C: Tensor) -> Tensor:
    """Sum over chunks of their weight times `chunk_sums`, int64 of shape (): the definition.

    data_CN   uint8 [C, CHUNK], starting at a multiple of 8 bytes
    weight_C  int64 [C]
    """
    return (chunk_sums(data_CN) * weight_C).sum()


def _device_sums(data: Tensor, start: int, role: str) -> list[Tensor]:
    """Numbers (int64 of shape (), on the device) that add up to the words' share."""
    out: list[Tensor] = []
    offset = start % CHUNK
    lead = data[: CHUNK - offset] if offset else data[:0]
    whole = (data.numel() - lead.numel()) // CHUNK * CHUNK
    body, tail = data[lead.numel() : lead.numel() + whole], data[lead.numel() + whole :]
    first = start // CHUNK
    if lead.numel():
        out.append(chunk_sums(_padded(lead, offset)[None])[0] * _signed(_chunk_weight(first, role)))
        first += 1
    if whole:
        if body.data_ptr() % 8 or body.storage_offset() % 8:
            body = body.clone()
        weight_C = _chunk_weights(first, whole // CHUNK, role, data.device)
        out.append(_fastest(body.view(-1, CHUNK))(body.view(-1, CHUNK), weight_C))
        first += whole // CHUNK
    if tail.numel():
        out.append(chunk_sums(_padded(tail, 0)[None])[0] * _signed(_chunk_weight(first, role)))
    return out


_Piece = tuple[int, str, Tensor]
"""Whose bytes, in what role, from their first one on."""


def _in_place(pieces: Sequence[_Piece]) -> Iterator[tuple[int, int]]:
    """(whose, a number that adds to its words' share), each piece by itself: copies nothing."""
    for owner, role, data in pieces:
        yield owner, sum(_to_host(_device_sums(data, 0, role)))


def _in_few_launches(pieces: Sequence[_Piece]) -> Iterator[tuple[int, int]]:
    """The same of pieces on one device, which is waited for once.

    Whole chunks of what is large have a launch of their own; small pieces and the ends of large ones are laid out in
    rows of a chunk and go together.
    """
    found: list[Tensor] = []
    owned: list[tuple[int, NDArray[np.uint64] | None]] = []
    ends: list[tuple[int, str, int, Tensor]] = []
    for owner, role, data in pieces:
        whole = data.numel() // CHUNK if data.numel() // CHUNK >= GROUP else 0
        if whole:
            found += _device_sums(data[: whole * CHUNK], 0, role)
            owned.append((owner, None))
        if data.numel() > whole * CHUNK:
            ends.append((owner, role, whole, data[whole * CHUNK :]))
    for run in _runs(ends):
        found.append(chunk_sums(_rows([data for *_, data in run])))
        owned += [(owner, _chunks(first, -(-len(data) // CHUNK), role)) for owner, role, first, data in run]
    sums = torch.cat([x.reshape(-1) for x in found]).cpu().numpy().view(np.uint64) if found else np.zeros(0, np.uint64)
    at = 0
    for owner, weights in owned:
        count = 1 if weights is None else len(weights)
        values = sums[at : at + count]
        yield owner, int((values if weights is None else values * weights).sum())
        at += count


def _runs(ends: Sequence[tuple[int, str, int, Tensor]]) -> Iterator[list[tuple[int, str, int, Tensor]]]:
    """What goes together: some TOGETHER chunks, so that what is in between stays small."""
    run: list[tuple[int, str, int, Tensor]] = []
    size = 0
    for end in ends:
        run.append(end)
        size += -(-len(end[-1]) // CHUNK)
        if size >= TOGETHER:
            yield run
            run, size = [], 0
    if run:
        yield run


def _rows(pieces: Sequence[Tensor]) -> Tensor:
    """Bytes of each piece, filled up with zeros to whole chunks: uint8 [C, CHUNK]."""
    zeros = torch.zeros(CHUNK, dtype=torch.uint8, device=pieces[0].device)
    laid = [x for data in pieces for x in (data, zeros[: -len(data) % CHUNK]) if len(x)]
    return torch.cat(laid).view(-1, CHUNK)


def _fastest(data_CN: Tensor):
    """`weighted_sum`, or on an NVIDIA GPU the one kernel with the same bits."""
    if data_CN.device.type == "cuda" and len(data_CN) >= GROUP:
        from onegrid.formats.digest_triton import triton_weighted_sum

        return triton_weighted_sum
    return weighted_sum


def _padded(data: Tensor, offset: int) -> Tensor:
    """`data` behind `offset` zero bytes, filled up with zeros to a multiple of 8."""
    end = offset + data.numel()
    out = torch.zeros(-(-end // 8) * 8, dtype=torch.uint8, device=data.device)
    out[offset:end] = data
    return out


def _to_host(sums: Sequence[Tensor]) -> list[int]:
    by_device: dict[torch.device, list[int]] = {}
    for i, x in enumerate(sums):
        by_device.setdefault(x.device, []).append(i)
    out = [0] * len(sums)
    for group in by_device.values():
        for i, value in zip(group, torch.stack([sums[i] for i in group]).tolist(), strict=True):
            out[i] = value
    return out


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _mix(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


@lru_cache(maxsize=1)
def _words() -> NDArray[np.uint64]:
    """The weights of a chunk's words."""
    return _mix(np.arange(CHUNK // 4, dtype=np.uint64)) | np.uint64(1)


@lru_cache(maxsize=8)
def pair_weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """For the 64-bit word, and for its upper half; see `chunk_sums`."""
    low, high = _words()[0::2], _words()[1::2]
    pair = (low.copy(), high - (low << np.uint64(32)))
    return tuple(torch.from_numpy(x.view(np.int64)).to(device) for x in pair)  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _chunk_table(role: str, count: int) -> NDArray[np.uint64]:
    """The weights of the first `count` chunks."""
    if role not in ROLES:
        raise FormatError(f"role {role!r}; allowed are {', '.join(ROLES)}")
    return _mix(_mix(np.arange(count, dtype=np.uint64)) ^ np.uint64(ROLES.index(role))) | np.uint64(1)


def _chunks(first: int, count: int, role: str) -> NDArray[np.uint64]:
    size = 64
    while size < first + count:
        size *= 2
    return _chunk_table(role, size)[first : first + count]


@lru_cache(maxsize=1 << 12)
def _chunk_weight(chunk: int, role: str) -> int:
    return int(_chunks(chunk, 1, role)[0])


@lru_cache(maxsize=256)
def _chunk_weights(first: int, count: int, role: str, device: torch.device) -> Tensor:
    return torch.from_numpy(_chunks(first, count, role).view(np.int64).copy()).to(device)


@lru_cache(maxsize=1)
def _prefixes() -> NDArray[np.uint64]:
    """Sum of the weights of the first n bytes of a chunk, n = 0 .. CHUNK."""
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.repeat(_words(), 4), dtype=np.uint64)])


@lru_cache(maxsize=1 << 12)
def _present(start: int, num_bytes: int, role: str) -> int:
    """What the presence of the bytes start .. start + num_bytes - 1 adds."""
    if not num_bytes:
        return 0
    prefixes, end = _prefixes(), start + num_bytes
    first, last = start // CHUNK, (end - 1) // CHUNK
    weights = _chunks(first, last - first + 1, role)
    spans = np.full(len(weights), prefixes[CHUNK])
    spans[-1] = prefixes[end - last * CHUNK]
    spans[:1] -= prefixes[start - first * CHUNK :][:1]
    return int((weights * spans).sum())
