"""A kernel that stores the uniform numbers that the draw's kernel has in the middle of it."""

import triton
import triton.language as tl
from torch import Tensor, float64

from onegrid.ops.draw_triton import uniform


@triton.jit
def _store(stream, position, out, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    x = uniform(tl.load(stream + at, mask=inside, other=0), tl.load(position + at, mask=inside, other=0))
    tl.store(out + at, x, mask=inside)


def numbers(stream_N: Tensor, position_N: Tensor) -> Tensor:
    """FP64 [N]"""
    out = stream_N.new_empty(len(stream_N), dtype=float64)
    _store[(triton.cdiv(len(out), 128),)](stream_N, position_N, out, len(out), BLOCK=128)
    return out
