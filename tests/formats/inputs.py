"""The inputs on which every quantizer is tested: where scales jump, where codes tie, and what is not a number."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129)
INF, NAN = float("inf"), float("nan")


def _bits(*patterns: int) -> Tensor:
    return torch.tensor([p - (1 << 32) if p >> 31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


def scale_boundaries() -> Tensor:
    """[127, 256]: amax significands 1.75, 1.5 and 1 with their neighbours, for every exponent, in blocks of 32.

    1.75 is where an E4M3 or E5M2 scale jumps, 1.5 where an E2M1 scale does. Blocks of 16 see two different amax.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for exponent in range(1, 255):
        significands = (0x600000, 0x600001, 0x5FFFFF) if exponent % 2 else (0x400000, 0x400001, 0x3FFFFF)
        for significand in (*significands, 0):
            amax = _bits(exponent << 23 | significand)
            block = amax * (2 * torch.rand(32, generator=generator) - 1)
            block[5] = amax.item()
            block[20] = -amax.item()
            blocks.append(block)
    return torch.stack(blocks[: 127 * 8]).reshape(127, 256)


def special_blocks() -> Tensor:
    """[K = 64 wide]: zeros of both signs, subnormals, NaN alone and among numbers, Inf, underflowing scales, ties."""
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    ties = torch.tensor([t for h in halves for t in (h, -h)] + [6.0, -6.0])
    up, down = torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)
    rows = [
        torch.zeros(64),
        -torch.zeros(64),
        torch.tensor([0.0, -0.0] * 32),
        _bits(*range(1, 33), *range(0x80000001, 0x80000021)),
        torch.full((64,), 1e-40),
        torch.cat((torch.tensor([NAN]), torch.ones(63))),
        torch.cat((_bits(0xFFC00001), -torch.ones(63))),
        torch.full((64,), NAN),
        torch.cat((torch.tensor([INF]), torch.ones(63))),
        torch.cat((torch.tensor([-INF, NAN]), torch.linspace(-3, 3, 62))),
        torch.cat((ties, up, down, ties * 2)),
        torch.cat((ties, torch.full((48,), 6.0))) / 6 * 448,
        torch.tensor([448.0, 464.0, 464.01, 465.0, 1000.0, -1000.0, 447.9, 432.0] * 8),
        torch.cat((torch.tensor([3.0e38, -3.4e38]), torch.zeros(62))),
        torch.linspace(-1, 1, 64) * 1e-30,
        torch.linspace(-1, 1, 64) * 1e-20,
        torch.arange(64).float() - 31.5,
        torch.cat((torch.zeros(63), torch.tensor([1.0]))),
    ]
    return torch.stack(rows)


def e4m3_scale_ties() -> Tensor:
    """[10, 816]: block amax values at the midpoints between neighbouring E4M3 scales, with their FP32 neighbours."""
    from onegrid.formats import E4M3
    from onegrid.formats.casts import decode_elements

    scales = decode_elements(torch.arange(0x7F, dtype=torch.uint8), E4M3)
    middle = (scales[1:] + scales[:-1]) / 2
    amax = torch.cat((middle, torch.nextafter(middle, middle * 2), torch.nextafter(middle, middle * 0), scales[1:]))
    blocks = amax[:, None] * torch.linspace(-1, 1, 16) * 6
    blocks[0, 0] = 2688.0  # so that S_enc is 1
    return blocks[: len(blocks) // 10 * 10].reshape(10, -1)


def one_number() -> Tensor:
    """[130, 140] zeros with a single 1: every other block, row and tile is empty."""
    x = torch.zeros(130, 140)
    x[0, 0] = 1
    return x


def ordinary(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def named() -> dict[str, Tensor]:
    return {
        "scale boundaries": scale_boundaries(),
        "special blocks": special_blocks(),
        "finite special rows": special_blocks()[[0, 1, 3, 10, 11, 12, 16]],
        "E4M3 scale ties": e4m3_scale_ties(),
        "one number": one_number(),
        "a zero tensor": torch.zeros(33, 48),
        "tiny tensor": ordinary(17, 40) * 1e-38,
        "huge tensor": ordinary(17, 40) * 1e37,
        "ordinary": ordinary(40, 136),
        "wide range": ordinary(20, 160) * torch.exp2(torch.arange(160.0) - 80),
    }
