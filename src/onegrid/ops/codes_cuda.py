"""Codes and scales of BF16 weights on NVIDIA GPUs in one pass over memory (`codes.cu`), with the bytes of `formats`.

Element by element the definition takes some twenty to forty launches and over a hundred bytes a number, each version
anew. Nothing here waits for the device: what was not finite is counted, and the caller looks when it has all counts.
NVFP4 has a scale of the whole tensor, so its numbers are read twice; the second time the last ones come first, which
the device's cache still holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, Quantizer, QuantTensor, Stats, quantize
from onegrid.ops.cuda_source import can_compile, kernel
from onegrid.ops.quantize_cuda import is_plain

THREADS = 256
CHUNKS = 4
"""Pieces of 8 numbers of a thread."""
OF_NVFP4 = {"MANTISSA": 1, "WIDTH": 16, "CHUNKS": 8, "SCALE": 2}
PARTS = 256
"""Most parts of a tensor whose amax is found apart: two blocks of threads for each of some 130 multiprocessors."""
SQUARE = (128, 128)


def quantized(
    x: Tensor, quantizer: Quantizer, amax: Tensor | None = None, *, counts: Tensor | None = None
) -> QuantTensor:
    """`formats.quantize` along the last axis, by the kernel where it covers the case.

    x     [..., M, K]; on a GPU codes, scales and other counts of blocks with NaN or Inf mean nothing, and
          `stats.nonfinite` says so
    amax  as in `quantize`
    counts  int64 [3] of zeros where x is, the place of `stats` where a kernel counts: those of many tensors are cleared
            at once. None: of its own.
    """
    fits = amax is None or (quantizer.takes_amax and amax.shape == x.shape[:-2])
    if fits and covers(x, quantizer):
        return codes_of(x, quantizer, amax, counts)
    return quantize(x, quantizer, amax=amax)  # which refuses what does not fit


def covers(x: Tensor, quantizer: Quantizer) -> bool:
    """BF16 in whole blocks on a GPU: MXFP8, MXFP4, NVFP4 with a scale per tensor, FP8 of 128 x 128 by powers of two."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and x.dim() >= 2 and can_compile(x.device)):
        return False
    return knows(quantizer, tuple(x.shape))


def knows(quantizer: Quantizer, shape: tuple[int, ...]) -> bool:
    """Whether there is a kernel for the rule and for this many rows and columns."""
    rows, width = shape[-2:]
    if not rows * width or torch.Size(shape).numel() >= 1 << 33:  # pieces are counted in 31 bits
        return False
    if quantizer.block == SQUARE:
        plain = quantizer.rule == "fp8_block" and quantizer.pow2 and quantizer.fmt.name == "e4m3"
        return plain and _is_usual(quantizer) and rows % 128 == width % 128 == 0
    return (
        is_plain(quantizer)
        and (quantizer.rule, quantizer.span, quantizer.block[1]) in (("mx", "none", 32), ("nvfp4", "tensor", 16))
        and width % (quantizer.block[1] or 1) == 0
    )


def _is_usual(quantizer: Quantizer) -> bool:
    options = (quantizer.zero_sign, quantizer.nan, quantizer.ties, quantizer.span)
    return options == ("keep", "element", "even", "none") and not quantizer.four_over_six


def codes_of(x: Tensor, quantizer: Quantizer, amax: Tensor | None = None, counts: Tensor | None = None) -> QuantTensor:
    """By the kernel, where it `covers`. amax: FP32 [...] of an NVFP4 tensor; None: its own."""
    made, launches = launches_of(x, quantizer, amax, counts)
    for launch in launches:
        launch()
    return made


def amax_of(x: Tensor) -> Tensor:
    """FP32 [...], the amax of each tensor [M, K] of x, in one pass where a kernel can. NaN where there is NaN.

    Elsewhere by torch, which has a copy of x without its signs, and reads that.
    """
    if not covers(x, QUANTIZERS["nvfp4"]):
        return x.abs().amax(dim=(-2, -1)).float()
    parts, launch = _tops(x.contiguous())
    launch()
    return parts.amax(-1).view(x.shape[:-2])


def new_counts(num: int, device: torch.device) -> Tensor:
    """int64 [num, 3] of zeros, a row for the counts of one tensor."""
    return torch.zeros(num, 3, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of `codes.cu` and what it is called with."""

    function: str
    blocks: int
    args: list[Tensor | int]
    macros: dict[str, int]

    def __call__(self) -> None:
        kernel("codes.cu", self.function, **self.macros)((self.blocks, 1, 1), (THREADS, 1, 1), self.args)


def launches_of(
    x: Tensor, quantizer: Quantizer, amax: Tensor | None, counts: Tensor | None = None
) -> tuple[QuantTensor, list[Launch]]:
    """Room for the result, and the launches that fill it; all of it where x is."""
    x = x.contiguous()
    lead, (rows, width) = tuple(x.shape[:-2]), x.shape[-2:]
    codes = torch.empty(*lead, rows, width * quantizer.fmt.bits // 8, dtype=torch.uint8, device=x.device)
    counts = new_counts(1, x.device)[0] if counts is None else counts
    macros = {"MANTISSA": quantizer.fmt.mantissa_bits, "WIDTH": quantizer.block[1] or 1, "CHUNKS": CHUNKS}

    def result(scales: Tensor, amax: Tensor | None = None, factor: Tensor | None = None) -> QuantTensor:
        return QuantTensor(codes, scales, amax, factor, tuple(x.shape), quantizer, -1, Stats(*counts.unbind()))

    if quantizer.block == SQUARE:
        scales = torch.empty(*lead, rows // 128, width // 128, device=x.device)
        args: list[Tensor | int] = [x, codes, scales, counts, width // 8]
        return result(scales), [Launch("squares", scales.numel(), args, macros | {"SCALE": 1})]
    scales = torch.empty(*lead, rows, width // macros["WIDTH"], dtype=torch.uint8, device=x.device)
    if quantizer.rule == "mx":
        pieces = x.numel() // 8
        blocks = -(-pieces // (THREADS * CHUNKS))
        args = [x, codes, scales, counts, x, x, x, pieces, blocks, 1]  # x: what only NVFP4 has
        return result(scales), [Launch("blocks", blocks, args, macros | {"SCALE": 0})]
    first = []
    if amax is None:
        parts, launch = _tops(x)
        first.append(launch)
    else:
        amax = amax.float()
        parts = amax.reshape(-1, 1).contiguous()
    found, factor = torch.empty(2, len(parts), device=x.device).unbind()
    pieces = rows * width // 8
    blocks = -(-pieces // (THREADS * OF_NVFP4["CHUNKS"]))
    args = [x, codes, scales, counts, parts, found, factor, pieces, blocks, parts.shape[1]]
    made = result(scales, found.view(lead) if amax is None else amax, factor.view(lead))
    return made, [*first, Launch("blocks", blocks * len(parts), args, OF_NVFP4)]


def _tops(x: Tensor) -> tuple[Tensor, Launch]:
    """FP32 [tensors, parts]: the amax of parts of each tensor, and how they come about. x: contiguous."""
    pieces = x.shape[-2] * x.shape[-1] // 8
    num_tensors, num_parts = x.numel() // 8 // pieces, min(PARTS, -(-pieces // (THREADS * OF_NVFP4["CHUNKS"])))
    parts = torch.empty(num_tensors, num_parts, device=x.device)
    return parts, Launch("tops", parts.numel(), [x, parts, pieces, num_parts], OF_NVFP4)
