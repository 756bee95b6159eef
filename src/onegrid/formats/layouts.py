"""Layouts: two 4-bit codes in a byte, and the 128x4 scale tiles that block-scaled matrix instructions read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onegrid.errors import FormatError


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes per byte along the last axis, the even element in the low nibble.

    codes  uint8 [..., K] with values 0..15. For odd K the last high nibble is 0.
    Returns uint8 [..., ceil(K/2)].
    """
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16) if codes.numel() else codes[..., 0::2].to(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)  # the low byte of a pair is the even element (little-endian)


def unpack(packed: Tensor, size: int | None = None) -> Tensor:
    """Inverse of `pack`; `size` is the logical length of the last axis (default: twice the packed length)."""
    full = 2 * packed.shape[-1]
    size = full if size is None else size
    if not full - 1 <= size <= full:
        raise FormatError(f"{packed.shape[-1]} packed bytes hold {full - 1} or {full} codes, not {size}")
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return codes.reshape(*packed.shape[:-1], full)[..., :size]


def swizzle_128x4(scales_MB: Tensor) -> Tensor:
    """Scale bytes in the tile order of cuBLASLt and FlashInfer: tiles of 128 rows by 4 blocks, 512 bytes each.

    scales_MB  uint8 [..., M, Kb]; pass the transpose for a column-wise operand. Padding bytes are 0.
    Returns uint8 [..., ceil128(M) ceil4(Kb)]. Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, blocks = scales_MB.shape[-2:]
    lead = scales_MB.shape[:-2]
    tile_rows, tile_blocks = -(-rows // 128), -(-blocks // 4)
    padded = F.pad(scales_MB, (0, 4 * tile_blocks - blocks, 0, 128 * tile_rows - rows))
    tiles = padded.reshape(*lead, tile_rows, 4, 32, tile_blocks, 4)
    return tiles.movedim(-2, -4).transpose(-2, -3).reshape(*lead, -1) if tiles.numel() else padded.reshape(*lead, 0)


def unswizzle_128x4(flat: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverse of `swizzle_128x4` for a logical grid of `shape` (M, Kb); padding is dropped without being looked at."""
    rows, blocks = shape
    lead = flat.shape[:-1]
    tile_rows, tile_blocks = -(-rows // 128), -(-blocks // 4)
    if flat.shape[-1] != 512 * tile_rows * tile_blocks:
        raise FormatError(
            f"a grid of {rows} x {blocks} scales takes {512 * tile_rows * tile_blocks} bytes, not {flat.shape[-1]}"
        )
    tiles = flat.reshape(*lead, tile_rows, tile_blocks, 32, 4, 4)
    padded = tiles.transpose(-2, -3).movedim(-4, -2).reshape(*lead, 128 * tile_rows, 4 * tile_blocks)
    return padded[..., :rows, :blocks].contiguous()
