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
from onegrid.ops.cuda_source import TensorMap, can_compile, kernel
from onegrid.ops.few_cuda import share_of
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up

LARGEST_BYTE = {"e4m3": 134, "e2m1": 136}
"""E8M0 scale bytes up to which a decoded value is one product: 2^7 and 2^9, times 448 and 6."""

SMALLEST_BYTE = {"e4m3": 0, "e2m1": 3}
"""Those from which on it is exact in BF16: E2M1 is decoded at 2^-8 of its value, and numbers below 2^-133 are none."""

_STEP = 512
"""K is a multiple of it: every row of scales is one of 16 bytes."""
_SHARED_BYTES = 226 * 1024
_MOST_STAGES = 16
_SCALE_SLOTS = 3
"""As SCALE_SLOTS in `packed.cu`."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Canonical codes and scales of a weight [N, K], or of several one below the other, as they lie in live storage."""

    codes: Tensor
    scales: Tensor
    quantizer: Quantizer
    shape: tuple[int, int]

    @property
    def decodes(self) -> range | None:
        """E8M0 scale bytes that the kernel decodes in blocks that are not zero; None where it decodes every scale."""
        name = self.quantizer.fmt.name
        return range(SMALLEST_BYTE[name], LARGEST_BYTE[name] + 1) if self.quantizer.scale == "e8m0" else None


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
    if a.kind != weight.quantizer.matmul:
        raise CapabilityError(f"packed matmul of {a.kind} rows with {weight.quantizer.name} weights")
    if a.kind == "nvfp4" and (a.row is None or row_N is None):
        raise CapabilityError("packed matmul of nvfp4 weights without the factors of rows and columns")
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiling, blocks, shared_bytes = tiling_of(weight.shape, weight.quantizer, num_rows, multiprocessors)
    ordered = arranged(x) if a.arranged is None else a.arranged
    out = x.new_empty(num_rows, num_columns, dtype=torch.bfloat16)
    factors = (x, x) if a.row is None or row_N is None else (a.row.contiguous(), row_N)
    early = int(may_begin_early(x.device))
    run = kernel("packed.cu", "packed_matmul", shared_bytes=shared_bytes, EARLY=early, **tiling)
    args = [ordered, *maps_of(weight.codes, weight.scales, tiling["COLUMNS"]), *factors, out, num_columns, depth]
    run((blocks, 1, 1), (threads_of(tiling["FORMS"]), 1, 1), args, shared_bytes)
    return out


def maps_of(codes: Tensor, scales: Tensor, columns: int) -> list[TensorMap]:
    """Codes and scales as the kernel's copies read them, `columns` rows of weights at a time."""
    codes, scales = (x.view(torch.uint8).view(x.shape[0], -1) for x in (codes, scales))
    return [TensorMap(codes, columns), TensorMap(scales, columns, 16)]


def threads_of(forms: int) -> int:
    """Of a block of so many warpgroups, with the three warps that copy."""
    return 128 * forms + 96


def tiling_of(
    shape: tuple[int, int], quantizer: Quantizer, num_rows: int, multiprocessors: int
) -> tuple[dict[str, int], int, int]:
    """Macros of `packed.cu`, blocks, and bytes of shared memory: an even share of columns for every multiprocessor."""
    columns = share_of(shape[0], multiprocessors)
    halves = 1 if columns <= 32 else 2
    columns = round_up(columns, 8 * halves)
    forms = -(-columns // (32 * halves))
    bits = quantizer.fmt.bits
    chunk = 128 * columns + 2 * num_rows * (1024 // bits)
    behind = (32 * halves * forms - columns) * 128  # what the last warpgroup reads beyond its columns
    rest = 1024 + behind + _SCALE_SLOTS * 16 * columns
    room = (_SHARED_BYTES - rest) // chunk
    chunks = 2 if room >= 6 else 1
    stages = min(_MOST_STAGES, room // chunks)
    macros = {"COLUMNS": columns, "FORMS": forms, "HALVES": halves, "MT": num_rows // 16, "CHUNKS": chunks}
    macros |= {"STAGES": stages, "BITS": bits, "E8M0": int(quantizer.scale == "e8m0")}
    return macros, -(-shape[0] // columns), rest + stages * chunks * chunk
