"""Codes and scales of BF16 weights on NVIDIA GPUs in one pass over memory (`codes.cu`), with the bytes of `formats`.

Element by element the definition takes some twenty to forty launches and over a hundred bytes a number, each version
anew. Nothing here waits for the device: what was not finite is counted, and the caller looks when it has all counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.formats import Quantizer, QuantTensor, Stats, quantize
from onegrid.formats.casts import FLT_MAX, divide
from onegrid.formats.scales import RECIPROCAL, global_encode
from onegrid.ops.cuda_source import can_compile, kernel
from onegrid.ops.quantize_cuda import is_plain

THREADS = 256
CHUNKS = 4
"""Pieces of 8 numbers of a thread."""
SQUARE = (128, 128)


def quantized(x: Tensor, quantizer: Quantizer, amax: Tensor | None = None) -> QuantTensor:
    """`formats.quantize` along the last axis, by the kernel where it covers the case.

    x     [..., M, K]; on a GPU codes and scales of blocks with NaN or Inf mean nothing, and `stats.nonfinite` says so
    amax  as in `quantize`
    """
    return codes_of(x, quantizer, amax) if covers(x, quantizer) else quantize(x, quantizer, amax=amax)


def covers(x: Tensor, quantizer: Quantizer) -> bool:
    """BF16 in whole blocks on a GPU: MXFP8, MXFP4, NVFP4 with a scale per tensor, FP8 of 128 x 128 by powers of two."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and x.dim() >= 2 and can_compile(x.device)):
        return False
    return knows(quantizer, tuple(x.shape))


def knows(quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
    """Whether there is a kernel for the rule and for this many rows and columns."""
    rows, width = shape[-2:]
    if not rows * width or torch.Size(shape).numel() >= 1 << 34:  # pieces are counted in 32 bits
        return False
    if quantizer.block == SQUARE:
        plain = quantizer.rule == "fp8_block" and quantizer.pow2 and quantizer.fmt.name == "e4m3"
        return plain and _is_usual(quantizer) and rows % 128 == width % 128 == 0
    return (
        is_plain(quantizer)
        and (quantizer.rule, quantizer.span) in (("mx", "none"), ("nvfp4", "tensor"))
        and width % (quantizer.block[1] or 1) == 0
    )


def _is_usual(quantizer: Quantizer) -> bool:
    options = (quantizer.zero_sign, quantizer.nan, quantizer.ties, quantizer.span)
    return options == ("keep", "element", "even", "none") and not quantizer.four_over_six


def codes_of(x: Tensor, quantizer: Quantizer, amax: Tensor | None = None) -> QuantTensor:
    """By the kernel, where it `covers`. amax: FP32 [...] of an NVFP4 tensor; None: its own."""
    x = x.contiguous()
    lead, (rows, width) = tuple(x.shape[:-2]), x.shape[-2:]
    bits = quantizer.fmt.bits
    codes = torch.empty(*lead, rows, width * bits // 8, dtype=torch.uint8, device=x.device)
    scales, arguments, blocks, function, macros = launch_of(x, quantizer, amax)
    counts = torch.empty(blocks, 3, dtype=torch.int32, device=x.device)
    run = kernel("codes.cu", function, **macros)
    run((blocks, 1, 1), (THREADS, 1, 1), [x, codes, scales, counts, *arguments])
    nonfinite, saturated, overflow = counts.sum(0).unbind()
    factor = None
    if quantizer.has_amax:
        amax = _own_amax(x) if amax is None else amax.float()
        factor = divide(1.0, global_encode(amax, quantizer))
        decodable = (amax >= 6.0 * quantizer.scale_max / FLT_MAX) & (amax <= FLT_MAX / quantizer.scale_max)
        overflow = (~decodable & (amax != 0)).sum()
    stats = Stats(nonfinite, saturated, overflow)
    return QuantTensor(codes, scales, amax, factor, tuple(x.shape), quantizer, -1, stats)


def launch_of(
    x: Tensor, quantizer: Quantizer, amax: Tensor | None
) -> tuple[Tensor, list[Tensor | int], int, str, dict[str, int]]:
    """Room for the scales, what the kernel is told beside it, its blocks, its name, and its macros."""
    lead, (rows, width) = tuple(x.shape[:-2]), x.shape[-2:]
    macros = {"MANTISSA": quantizer.fmt.mantissa_bits, "WIDTH": quantizer.block[1] or 1, "CHUNKS": CHUNKS}
    if quantizer.block == SQUARE:
        scales = torch.empty(*lead, rows // 128, width // 128, device=x.device)
        return scales, [width // 8], scales.numel(), "squares", macros | {"SCALE": 1}
    block = quantizer.block[1] or 1
    scales = torch.empty(*lead, rows, width // block, dtype=torch.uint8, device=x.device)
    pieces, whole = x.numel() // 8, rows * width // 8
    sixth = inverse = x
    if quantizer.rule == "nvfp4":
        encode = global_encode(_own_amax(x) if amax is None else amax.float(), quantizer)
        sixth, inverse = (encode * RECIPROCAL["e2m1"]).contiguous(), divide(1.0, encode).contiguous()
    scale = 2 if quantizer.rule == "nvfp4" else 0
    blocks = -(-pieces // (THREADS * CHUNKS))
    return scales, [sixth, inverse, pieces, whole], blocks, "blocks", macros | {"SCALE": scale}


def _own_amax(x: Tensor) -> Tensor:
    """FP32 [...], of each tensor of a stack."""
    low, high = torch.aminmax(x.flatten(-2), dim=-1)
    return torch.maximum(-low, high).float()
