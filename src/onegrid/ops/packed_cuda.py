"""Matmuls at few rows from packed codes and scales: `packed.cu`, with the bytes of the decoded weights' matmul.

A sum is one chain of products, K ascending, so a matmul of few columns takes as long as one warp needs for its chain:
tiles are narrow, and a warp takes few of them. Decoded values are exact in BF16, and `mma` adds K in ascending steps of
16 as cuBLAS does under the pins, so FP32 sums have the same bits (measured at every shape that
tests/ops/test_low_bits.py runs; `model.live` proves the model's own).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import Quantizer
from onegrid.ops.capture import may_begin_early
from onegrid.ops.cuda_source import can_compile, kernel
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up

MOST_ROWS = 64
LARGEST_BYTE = {"e4m3": 134, "e2m1": 136}
"""E8M0 scale bytes up to which a decoded value is one product: 2^7 and 2^9, times 448 and 6."""

_DEPTH = 256
"""Numbers of k in a stage."""
_SHARED_BYTES = 226 * 1024
_MOST_TILES = 24
_MOST_WARPS = 12
_MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """Canonical codes and scales of a weight [N, K], or of several one below the other, as they lie in live storage."""

    codes: Tensor
    scales: Tensor
    quantizer: Quantizer
    shape: tuple[int, int]

    @property
    def limit(self) -> int:
        """Largest scale byte that the kernel decodes."""
        return LARGEST_BYTE[self.quantizer.fmt.name] if self.quantizer.scale == "e8m0" else 255

    def check(self) -> None:
        """CapabilityError where a block's scale is beyond `limit`. Waits for the device."""
        largest = int(self.scales.max())
        if largest > self.limit:
            raise CapabilityError(
                f"packed weights: a block's scale is 2^{largest - 127}, at most 2^{self.limit - 127} is covered; "
                'set sampler.weights = "decoded"'
            )


def covers(quantizer: Quantizer | None, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `packed_matmul` knows the weights: MXFP8, MXFP4, NVFP4 in blocks of 1 x w, K of whole stages."""
    return (
        quantizer is not None
        and (quantizer.fmt.name, quantizer.scale, quantizer.block)
        in (("e4m3", "e8m0", (1, 32)), ("e2m1", "e8m0", (1, 32)), ("e2m1", "e4m3", (1, 16)))
        and len(shape) == 2
        and shape[0] % 16 == 0
        and shape[1] % _DEPTH == 0
        and can_compile(device)
    )


def packed_matmul(a: Operand, weight: Packed, row_N: Tensor | None) -> Tensor:
    """BF16 [M, N]: `ops.linear.matmul` of `a` and the weight's decoded operand, M a multiple of TILE up to MOST_ROWS.

    a      activations, "decoded" or "nvfp4" as the weight
    row_N  FP32 [N] global amax per row of an NVFP4 weight, else None
    Codes of NaN are not decoded as NaN: weights are finite by the time they are published.
    """
    num_columns, depth = weight.shape
    quantizer = weight.quantizer
    x = a.values.contiguous()
    num_rows = x.shape[0]
    if num_rows % TILE or not 0 < num_rows <= MOST_ROWS:
        raise CapabilityError(f"packed matmul of {num_rows} rows; multiples of {TILE} up to {MOST_ROWS} are covered")
    if x.shape[1] != depth:
        raise CapabilityError(f"packed matmul of rows of {x.shape[1]} numbers with weights of {depth}")
    pairs, bits, e8m0 = num_rows // 16, quantizer.fmt.bits, quantizer.scale == "e8m0"
    scale_bytes = _DEPTH // (32 if e8m0 else 16)
    tiles, per_warp, stages = _tiles(num_columns, pairs, bits, scale_bytes)
    shared_bytes = stages * _stage_bytes(tiles, pairs, bits, scale_bytes)
    run = kernel(
        "packed.cu", "packed_matmul", shared_bytes=shared_bytes, NT=tiles, TPW=per_warp, WR=1, MT=pairs, KS=_DEPTH,
        STAGES=stages, BITS=bits, E8M0=int(e8m0), EARLY=int(may_begin_early(x.device)),
    )  # fmt: skip
    out = torch.empty(num_rows, num_columns, dtype=torch.bfloat16, device=x.device)
    factors = (x, x) if a.row is None or row_N is None else (a.row.contiguous(), row_N)
    threads = 32 * (tiles // per_warp + 5)
    grid = (-(-num_columns // (8 * tiles)), 1, 1)
    run(grid, (threads, 1, 1), [x, weight.codes, weight.scales, *factors, out, num_columns, depth], shared_bytes)
    return out


def _tiles(num_columns: int, pairs: int, bits: int, scale_bytes: int) -> tuple[int, int, int]:
    """Tiles of 8 columns of one block, as even a share for every multiprocessor as fits; of one warp; and stages."""
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    waves = 0
    while True:
        waves += 1
        tiles = -(-num_columns // (8 * waves * multiprocessors))
        per_warp = -(-tiles // _MOST_WARPS)
        tiles = round_up(tiles, per_warp)
        stages = min(_MOST_STAGES, _SHARED_BYTES // _stage_bytes(tiles, pairs, bits, scale_bytes))
        if tiles <= _MOST_TILES and stages >= 2:
            return tiles, per_warp, stages


def _stage_bytes(tiles: int, pairs: int, bits: int, scale_bytes: int) -> int:
    """As STAGE_BYTES in `packed.cu`."""
    return round_up(8 * tiles * (_DEPTH * bits // 8 + 16 + scale_bytes) + 16 * pairs * (2 * _DEPTH + 16), 128)
