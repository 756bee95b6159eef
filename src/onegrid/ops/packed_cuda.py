"""Matmuls at few rows from packed codes and scales: `packed.cu`, with the bytes of the decoded weights' matmul.

A sum is one chain of products, K ascending, so a matmul of few columns takes as long as one warpgroup needs for its
chain. Decoded values are exact in BF16, and the matrix unit adds K in ascending steps of 16 as cuBLAS does under the
pins, so FP32 sums have the same bits (measured at every shape that tests/ops/test_low_bits.py runs; `model.live` proves
the model's own).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import Quantizer
from onegrid.ops.arranged import MOST_ROWS, arranged, is_for
from onegrid.ops.capture import may_begin_early
from onegrid.ops.cuda_source import can_compile, kernel
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up

LARGEST_BYTE = {"e4m3": 134, "e2m1": 136}
"""E8M0 scale bytes up to which a decoded value is one product: 2^7 and 2^9, times 448 and 6."""

_STEP = 256
"""K is a multiple of it."""
_DEPTHS = (512, 256, 128)
"""Numbers of k in a stage."""
_SHARED_BYTES = 226 * 1024
_MOST_STAGES = 8
_MOST_FORMS = 4
_COLUMNS = 32
"""Half of what a warpgroup takes."""


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
    """Whether `packed_matmul` knows the weights: MXFP8, MXFP4, NVFP4 in blocks of 1 x w, and the GPU: Hopper's."""
    return (
        quantizer is not None
        and (quantizer.fmt.name, quantizer.scale, quantizer.block)
        in (("e4m3", "e8m0", (1, 32)), ("e2m1", "e8m0", (1, 32)), ("e2m1", "e4m3", (1, 16)))
        and len(shape) == 2
        and shape[0] % 16 == 0
        and shape[1] % _STEP == 0
        and is_for(device)
        and can_compile(device)
    )


def packed_matmul(a: Operand, weight: Packed, row_N: Tensor | None) -> Tensor:
    """BF16 [M, N]: `ops.linear.matmul` of `a` and the weight's decoded operand, M a multiple of TILE up to MOST_ROWS.

    a      activations, "decoded" or "nvfp4" as the weight
    row_N  FP32 [N] global amax per row of an NVFP4 weight, else None
    Codes of NaN are not decoded as NaN: weights are finite by the time they are published.
    """
    num_columns, depth = weight.shape
    x = a.values.contiguous()
    num_rows = x.shape[0]
    if num_rows % TILE or not 0 < num_rows <= MOST_ROWS:
        raise CapabilityError(f"packed matmul of {num_rows} rows; multiples of {TILE} up to {MOST_ROWS} are covered")
    if x.shape[1] != depth:
        raise CapabilityError(f"packed matmul of rows of {x.shape[1]} numbers with weights of {depth}")
    tiling, shared_bytes = _tiling(weight, num_rows // 16)
    ordered = arranged(x) if a.arranged is None else a.arranged
    out = x.new_empty(num_rows, num_columns, dtype=torch.bfloat16)
    factors = (x, x) if a.row is None or row_N is None else (a.row.contiguous(), row_N)
    early = int(may_begin_early(x.device))
    run = kernel("packed.cu", "packed_matmul", shared_bytes=shared_bytes, EARLY=early, **tiling)
    args = [ordered, weight.codes, weight.scales, *factors, out, num_columns, depth]
    blocks = -(-num_columns // (_COLUMNS * tiling["FORMS"] * tiling["HALVES"]))
    run((blocks, 1, 1), (threads_of(tiling["FORMS"]), 1, 1), args, shared_bytes)
    return out


def threads_of(forms: int) -> int:
    """Of a block of so many warpgroups, with those that copy weights (COPIERS in `packed.cu`) and a warp for rows."""
    return 128 * forms + (128 if forms < 3 else 96) + 32


def _tiling(weight: Packed, pairs: int) -> tuple[dict[str, int], int]:
    """Warpgroups of a block, full or half, an even share for every multiprocessor; its stages, and their bytes."""
    num_columns, depth = weight.shape
    e8m0 = weight.quantizer.scale == "e8m0"
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    halves, waves = 1 if num_columns <= _COLUMNS * multiprocessors else 2, 1
    tiles = -(-num_columns // (_COLUMNS * halves))
    while (forms := -(-tiles // (waves * multiprocessors))) > _MOST_FORMS:
        waves += 1
    found = {"FORMS": forms, "HALVES": halves, "MT": pairs, "BITS": weight.quantizer.fmt.bits, "E8M0": int(e8m0)}
    fits = []
    for size in _DEPTHS if e8m0 else (_STEP,):
        stage = _stage_bytes(**found, KS=size)
        stages = min(_MOST_STAGES, _SHARED_BYTES // stage)
        fitting = stages >= 3 if size == 128 else stages >= 2  # codes are read half a stage of 256 ahead
        if depth % size == 0 and fitting and (forms < 3 or size < 512):  # ptxas lets no two products overlap there
            fits.append(({**found, "KS": size, "STAGES": stages}, stages * stage))
    return next((one for one in fits if one[0]["STAGES"] >= 3), fits[-1])


def _stage_bytes(FORMS: int, HALVES: int, MT: int, KS: int, BITS: int, E8M0: int) -> int:
    """As STAGE_BYTES in `packed.cu`."""
    weights = _COLUMNS * HALVES * FORMS * (KS * BITS // 8 + 16 + KS // (32 if E8M0 else 16))
    return round_up(weights + 16 * MT * 2 * KS, 128)
