"""BF16 matmuls at few rows: `few.cu`, with the bytes of the library's under the pins.

Few rows are as slow as their weights are read. The library gives a matmul of few columns tiles that leave half of the
multiprocessors without one, and starts reading after the kernel ahead has ended; here every multiprocessor has an even
share, asks for most of the shared memory's worth of weights at once, and begins with it early.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.ops.arranged import MOST_ROWS, is_for
from onegrid.ops.capture import may_begin_early
from onegrid.ops.cuda_source import TensorMap, can_compile, kernel
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up

_SLAB = 64
"""Numbers of k that the copy engine brings at once."""
_SLABS = 2
"""Of a stage; K is a multiple of both together. With the most columns and rows there is room for three stages."""
_SHARED_BYTES = 226 * 1024
_MOST_STAGES = 16
_MOST_COLUMNS = 192


def covers(shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `few_matmul` knows weights [N, K], N a multiple of 8 and K of 128, and the GPU: Hopper's."""
    return (
        len(shape) == 2
        and shape[0] % 8 == 0
        and shape[1] % (_SLABS * _SLAB) == 0
        and min(shape) > 0
        and is_for(device)
        and can_compile(device)
    )


def few_matmul(a: Operand, b: Operand) -> Tensor:
    """BF16 [M, N]: `ops.linear.matmul` of two operands of kind "decoded", M a multiple of TILE up to MOST_ROWS.

    NaN and Inf spread as in FP32 arithmetic. Raises CapabilityError for other rows, kinds and shapes.
    """
    num_rows, depth = a.values.shape
    shape = b.values.shape[0], b.values.shape[1]
    if num_rows % TILE or not 0 < num_rows <= MOST_ROWS:
        raise CapabilityError(f"matmul of {num_rows} rows; multiples of {TILE} up to {MOST_ROWS} are covered")
    if (a.kind, b.kind) != ("decoded", "decoded") or depth != shape[1] or not covers(shape, a.values.device):
        raise CapabilityError(f"matmul of {a.kind} rows of {depth} numbers with {b.kind} weights {shape}; not covered")
    x, w = a.values.contiguous(), b.values.contiguous()
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiling, blocks, shared_bytes = tiling_of(shape, num_rows, multiprocessors)
    out = x.new_empty(num_rows, shape[0])
    maps = [TensorMap(w, tiling["COLUMNS"]), TensorMap(x, num_rows)]
    early = int(may_begin_early(x.device))
    run = kernel("few.cu", "few_matmul", shared_bytes=shared_bytes, EARLY=early, **tiling)
    run((blocks, 1, 1), (threads_of(tiling["FORMS"]), 1, 1), [*maps, out, *shape], shared_bytes)
    return out


def threads_of(forms: int) -> int:
    """Of a block of so many warpgroups, with the two warps that copy."""
    return 128 * forms + 64


def tiling_of(shape: tuple[int, int], num_rows: int, multiprocessors: int) -> tuple[dict[str, int], int, int]:
    """Macros of `few.cu`, blocks, and bytes of shared memory: an even share of columns for every multiprocessor."""
    columns = share_of(shape[0], multiprocessors)
    forms = -(-columns // 64)
    behind = (64 * forms - columns) * 2 * _SLAB  # what the last warpgroup reads beyond its columns
    room = _SHARED_BYTES - 1024 - behind
    stage = _SLABS * (columns + num_rows) * 2 * _SLAB
    stages = min(_MOST_STAGES, room // stage)
    macros = {"COLUMNS": columns, "FORMS": forms, "MT": num_rows // 16, "SLABS": _SLABS, "STAGES": stages}
    return macros, -(-shape[0] // columns), 1024 + behind + stages * stage


def share_of(num_columns: int, multiprocessors: int) -> int:
    """Columns of a block, a multiple of 8 up to 192: in every wave of blocks all multiprocessors have as many."""
    waves = -(-num_columns // (multiprocessors * _MOST_COLUMNS))
    return min(_MOST_COLUMNS, round_up(-(-num_columns // (waves * multiprocessors)), 8))
