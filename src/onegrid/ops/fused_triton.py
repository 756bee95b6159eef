"""Elementwise chains of the decoder as one kernel each on NVIDIA GPUs, where each step would be launch cost alone.

Both sides call these very kernels, forward; gradients are those of the definitions. SwiGLU and rotation give the
bytes of their definitions: products that the definition rounds are `mul.rn`, which no compiler contracts. A norm sums
a row in another order than the definition, so it is `rows`, not `bits`, and both sides must use the same one.
"""

import triton
import triton.language as tl
from torch import Tensor, bfloat16
from triton.language.extra import libdevice

from onegrid.ops.early import begin, options

HEADS = 8
"""Heads of one program."""


@triton.jit
def _mul(x, y):
    """The rounded product, never part of a multiply-add."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def normed(x, y, weight, total, row, stride_x, stride_y, eps, width, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of a row, BF16 [BLOCK], of x or of x + y, which is then stored. Every norm kernel sums in this order."""
    d = tl.arange(0, BLOCK)
    inside = d < width
    value = tl.load(x + row * stride_x + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        value += tl.load(y + row * stride_y + d, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(total + row * width + d, rounded, mask=inside)
        value = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(_mul(value, value), 0) / width + eps)
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    return _mul(_mul(value, rstd), w).to(tl.bfloat16)


@triton.jit
def _norm(
    x, y, weight, total, out, stride_x, stride_y, eps, width, HAS_Y: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    h = normed(x, y, weight, total, row, stride_x, stride_y, eps, width, HAS_Y, BLOCK)
    tl.store(out + row * width + d, h, mask=d < width)


@triton.jit
def _heads(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, position, stride_q, stride_k, eps, num_heads, num_groups,
    NORM: tl.constexpr, HALF: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_queries = tl.cdiv(num_heads, TOGETHER)
    if part < of_queries:
        source, target, weight = q + row * stride_q, q_out + row * num_heads * 2 * HALF, q_weight
        count = num_heads
    else:
        part -= of_queries
        source, target, weight = k + row * stride_k, k_out + row * num_groups * 2 * HALF, k_weight
        count = num_groups
    head = part * TOGETHER + tl.arange(0, TOGETHER)
    d = tl.arange(0, HALF)
    inside = (head < count)[:, None]
    at = head[:, None] * 2 * HALF + d[None, :]
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(_mul(first, first) + _mul(second, second), 1)
        rstd = tl.broadcast_to(tl.rsqrt(square / (2 * HALF) + eps)[:, None], [TOGETHER, HALF])
        w = tl.broadcast_to(tl.load(weight + d).to(tl.float32)[None, :], [TOGETHER, HALF])
        first = _mul(_mul(first, rstd), w).to(tl.bfloat16).to(tl.float32)
        w = tl.broadcast_to(tl.load(weight + HALF + d).to(tl.float32)[None, :], [TOGETHER, HALF])
        second = _mul(_mul(second, rstd), w).to(tl.bfloat16).to(tl.float32)
    place = tl.load(position + row) * HALF + d
    c = tl.broadcast_to(tl.load(cos + place)[None, :], [TOGETHER, HALF])
    s = tl.broadcast_to(tl.load(sin + place)[None, :], [TOGETHER, HALF])
    tl.store(target + at, (_mul(first, c) - _mul(second, s)).to(tl.bfloat16), mask=inside)
    tl.store(target + HALF + at, (_mul(second, c) + _mul(first, s)).to(tl.bfloat16), mask=inside)


@triton.jit
def gated(gate, up, d, width):
    """silu(gate) * up at columns d of a row, BF16; zero beyond `width`."""
    g = tl.load(gate + d, mask=d < width, other=0.0).to(tl.float32)
    u = tl.load(up + d, mask=d < width, other=0.0).to(tl.float32)
    return _mul(tl.div_rn(g, 1.0 + libdevice.exp(-g)), u).to(tl.bfloat16)


@triton.jit
def _swiglu(gate, up, out, stride_gate, stride_up, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * width + d, gated(gate + row * stride_gate, up + row * stride_up, d, width), mask=d < width)


def norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows, BF16 to BF16; `ops.norm.rms_norm` is the definition."""
    width = x_ND.shape[-1]
    x = whole_rows(x_ND.reshape(-1, width))
    out = x.new_empty(x.shape)
    if len(x):
        block = triton.next_power_of_2(width)
        _norm[(len(x),)](
            x, x, weight_D, out, out, x.stride(0), 0, eps, width,
            HAS_Y=False, BLOCK=block, num_warps=warps_of(block), **options(x.device),
        )  # fmt: skip
    return out.view(x_ND.shape)


def residual_norm(x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y rounded to BF16, and its RMSNorm, both BF16 [N, D]."""
    width = x_ND.shape[-1]
    x_ND, y_ND = whole_rows(x_ND), whole_rows(y_ND)
    total, out = x_ND.new_empty(x_ND.shape), x_ND.new_empty(x_ND.shape)
    if len(x_ND):
        block = triton.next_power_of_2(width)
        _norm[(len(x_ND),)](
            x_ND, y_ND, weight_D, total, out, x_ND.stride(0), y_ND.stride(0), eps, width,
            HAS_Y=True, BLOCK=block, num_warps=warps_of(block), **options(x_ND.device),
        )  # fmt: skip
    return total, out


def heads(
    q_NHD: Tensor,
    k_NGD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    position_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Head norm (where there are weights) and rotation of queries and keys, BF16 to BF16.

    rope        FP32 tables [positions, D / 2] of cos and sin; position_N int64
    Rows may have any stride; where the heads of a row do not lie side by side, they are copied first.
    """
    num_rows, num_heads, width = q_NHD.shape
    q_NHD, k_NGD = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (q_NHD, k_NGD))
    num_groups = k_NGD.shape[1]
    q, k = q_NHD.new_empty(q_NHD.shape), k_NGD.new_empty(k_NGD.shape)
    if num_rows:
        weights = (q_weight_D if q_weight_D is not None else q, k_weight_D if k_weight_D is not None else k)
        parts = triton.cdiv(num_heads, HEADS) + triton.cdiv(num_groups, HEADS)
        _heads[(num_rows, parts)](
            q_NHD, k_NGD, q, k, *weights, *rope, position_N, q_NHD.stride(0), k_NGD.stride(0), eps,
            num_heads, num_groups, NORM=q_weight_D is not None, HALF=width // 2, TOGETHER=HEADS, num_warps=4,
            **options(q_NHD.device),
        )  # fmt: skip
    return q, k


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """silu(gate) * up, BF16 to BF16, the bytes of `ops.activation.swiglu`. Rows may have any stride."""
    width = gate_NF.shape[-1]
    if gate_NF.dim() != 2:
        return swiglu(gate_NF.reshape(-1, width), up_NF.reshape(-1, width)).view(gate_NF.shape)
    gate_NF, up_NF = whole_rows(gate_NF), whole_rows(up_NF)
    out = gate_NF.new_empty(gate_NF.shape, dtype=bfloat16)
    if len(out):
        _swiglu[(len(out), triton.cdiv(width, 1024))](  # rows first: only that axis goes beyond 65,535
            gate_NF, up_NF, out, gate_NF.stride(0), up_NF.stride(0), width, BLOCK=1024, num_warps=4,
            **options(gate_NF.device),
        )  # fmt: skip
    return out


def whole_rows(x_ND: Tensor) -> Tensor:
    """Rows whose numbers lie one after another, as kernels read them; the argument itself where they do."""
    return x_ND if x_ND.stride(-1) == 1 else x_ND.contiguous()


def warps_of(block: int) -> int:
    """Depends on the width only: another number could be another order of sums."""
    return min(16, max(1, block // 512))
