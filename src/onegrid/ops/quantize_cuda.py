"""Quantize and decode of rows on NVIDIA GPUs in one pass over memory (`quantize.cu`), with the bytes of the definition.

The compiled definition reads its input twice and takes some 25 instructions a number; in packed BF16 arithmetic, where
everything a power-of-two scale needs is exact or rounded once, it is 10, so the pass costs what a copy costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.ops.arranged import room
from onegrid.ops.capture import may_begin_early
from onegrid.ops.cuda_source import can_compile, kernel

RULES = {"mx": 0, "fp8_block": 1, "nvfp4": 2}
"""Scale rules that kernels know, by the number that they know them by."""

THREADS = 256
LONGEST = 65_536
"""Numbers of an NVFP4 row that a block of threads keeps in registers."""


def is_plain(quantizer: Quantizer) -> bool:
    """One of the project's own rules in `RULES`, in blocks of 1 x w, without options."""
    return (
        quantizer.rule in RULES
        and quantizer.block[0] == 1
        and quantizer.block[1] in (16, 32, 128)
        and quantizer.fmt.name in ("e4m3", "e2m1")
        and quantizer.scale_max == 448.0
        and not quantizer.four_over_six
        and (quantizer.zero_sign, quantizer.nan, quantizer.ties) == ("keep", "element", "even")
    )


def covers(x_MK: Tensor, quantizer: Quantizer) -> bool:
    """Whether `quantize_decode` here gives that of `formats`: BF16 [M, K] in whole blocks, see `is_plain`."""
    width = quantizer.block[1]
    if not (x_MK.is_cuda and x_MK.dtype == torch.bfloat16 and x_MK.dim() == 2 and x_MK.numel() and is_plain(quantizer)):
        return False
    if width is None or x_MK.shape[1] % width or not can_compile(x_MK.device):
        return False
    if quantizer.rule == "nvfp4":
        return quantizer.span == "row" and x_MK.shape[1] <= LONGEST
    return quantizer.span == "none" and (quantizer.rule == "mx" or quantizer.pow2)


def quantize_decode(x_MK: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """BF16 [M, K] of `formats.quantize_decode` along the last axis, FP32 [M], the amax per row where there is one, and
    the values once more in the order of `arranged` where a packed matmul may read them.

    NaN, Inf, zeros and subnormal numbers as in the definition. Only where `covers`.
    """
    x = x_MK.contiguous()
    num_rows, depth = x.shape
    out, arranged = torch.empty_like(x), room(x)
    macros = {"WIDTH": quantizer.block[1] or 0, "FOUR": int(quantizer.fmt.bits == 4), "POWERS": RULES[quantizer.rule]}
    macros |= {"EARLY": int(may_begin_early(x.device)), "ARRANGED": int(arranged is not None)}
    both = [x, out, out if arranged is None else arranged]
    if quantizer.rule == "nvfp4":
        amax = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        rows = kernel("quantize.cu", "rows", CHUNKS=-(-depth // (8 * THREADS)), **macros)
        rows((num_rows, 1, 1), (THREADS, 1, 1), [*both, amax, depth // 8, depth // 8])
        return out, amax, arranged
    pieces = x.numel() // 8
    chunks = 4 if pieces >= 1 << 19 else 1
    flat = kernel("quantize.cu", "flat", CHUNKS=chunks, **macros)
    flat((-(-pieces // (THREADS * chunks)), 1, 1), (THREADS, 1, 1), [*both, pieces, depth // 8])
    return out, None, arranged
