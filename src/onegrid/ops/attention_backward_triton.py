"""Gradients of packed causal attention in Triton. No atomics: every sum has one owner and one order.

With P the softmax, O = P V and dO given: dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K, dK = dS^T Q, the last
two times the scale. Scores are computed again from q, k and the saved log2 of the sums. A program that owns a tile of
keys walks all queries and heads of its group; one that owns a tile of queries walks its keys. Dao, arXiv 2307.08691.
"""

import triton
import triton.language as tl
from torch import Tensor, float32

from onegrid.ops.attention_triton import scale_of


@triton.jit
def _keys_gradient(
    q, k, v, dout, lse, delta, dk, dv, first_B, length_B, stride_q, stride_k, stride_v, scale, width_scale,
    num_heads, num_groups,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key0, group, b = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    length = tl.load(length_B + b).to(tl.int32)
    if key0 >= length:
        return
    first = tl.load(first_B + b).to(tl.int64)
    key, d = key0 + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    seen = (key < length)[:, None]
    k_KD = tl.load(k + (first + key)[:, None] * stride_k + group * WIDTH + d[None, :], mask=seen, other=0.0)
    v_KD = tl.load(v + (first + key)[:, None] * stride_v + group * WIDTH + d[None, :], mask=seen, other=0.0)
    dk_KD, dv_KD = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    for row0 in range(key0 * REPEAT // ROWS * ROWS, length * REPEAT, ROWS):
        row = row0 + tl.arange(0, ROWS)
        position, head = row // REPEAT, group * REPEAT + row % REPEAT
        inside = position < length
        place = (first + position) * num_heads + head
        at = (first + position)[:, None] * stride_q + (head * WIDTH)[:, None] + d[None, :]
        q_MD = tl.load(q + at, mask=inside[:, None], other=0.0)
        do_MD = tl.load(dout + place[:, None] * WIDTH + d[None, :], mask=inside[:, None], other=0.0)
        lse_M = tl.load(lse + place, mask=inside, other=0.0)
        delta_M = tl.load(delta + place, mask=inside, other=0.0)
        p_KM = tl.exp2(tl.dot(k_KD, tl.trans(q_MD)) * scale - lse_M[None, :])
        p_KM = tl.where((key[:, None] <= position[None, :]) & inside[None, :], p_KM, 0.0)
        dv_KD = tl.dot(p_KM.to(tl.bfloat16), do_MD, dv_KD)
        ds_KM = p_KM * (tl.dot(v_KD, tl.trans(do_MD)) - delta_M[None, :])
        dk_KD = tl.dot(ds_KM.to(tl.bfloat16), q_MD, dk_KD)
    at = ((first + key) * num_groups + group)[:, None] * WIDTH + d[None, :]
    tl.store(dk + at, (dk_KD * width_scale).to(tl.bfloat16), mask=seen)
    tl.store(dv + at, dv_KD.to(tl.bfloat16), mask=seen)


@triton.jit
def _queries_gradient(
    q, k, v, dout, lse, delta, dq, first_B, length_B, stride_q, stride_k, stride_v, scale, width_scale, num_heads,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    group, b = tl.program_id(1), tl.program_id(2)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    length = tl.load(length_B + b).to(tl.int32)
    if row0 >= length * REPEAT:
        return
    first = tl.load(first_B + b).to(tl.int64)
    row, d = row0 + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    position, head = row // REPEAT, group * REPEAT + row % REPEAT
    inside = position < length
    place = (first + position) * num_heads + head
    at = (first + position)[:, None] * stride_q + (head * WIDTH)[:, None] + d[None, :]
    q_MD = tl.load(q + at, mask=inside[:, None], other=0.0)
    do_MD = tl.load(dout + place[:, None] * WIDTH + d[None, :], mask=inside[:, None], other=0.0)
    lse_M = tl.load(lse + place, mask=inside, other=0.0)
    delta_M = tl.load(delta + place, mask=inside, other=0.0)
    dq_MD = tl.zeros([ROWS, WIDTH], tl.float32)
    for key0 in range(0, tl.minimum(length, (row0 + ROWS - 1) // REPEAT + 1), KEYS):
        key = key0 + tl.arange(0, KEYS)
        seen = (key < length)[:, None]
        k_KD = tl.load(k + (first + key)[:, None] * stride_k + group * WIDTH + d[None, :], mask=seen, other=0.0)
        v_KD = tl.load(v + (first + key)[:, None] * stride_v + group * WIDTH + d[None, :], mask=seen, other=0.0)
        p_MK = tl.exp2(tl.dot(q_MD, tl.trans(k_KD)) * scale - lse_M[:, None])
        p_MK = tl.where((key[None, :] <= position[:, None]) & inside[:, None], p_MK, 0.0)
        ds_MK = p_MK * (tl.dot(do_MD, tl.trans(v_KD)) - delta_M[:, None])
        dq_MD = tl.dot(ds_MK.to(tl.bfloat16), k_KD, dq_MD)
    out_at = place[:, None] * WIDTH + d[None, :]
    tl.store(dq + out_at, (dq_MD * width_scale).to(tl.bfloat16), mask=inside[:, None])


def backward(
    dout_NHD: Tensor,
    out_NHD: Tensor,
    lse_NH: Tensor,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    first_B: Tensor,
    length_B: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv BF16 from the gradient of `attention_triton.prefill`'s output. Rows of no sequence get zeros."""
    num_heads, width = q_NHD.shape[1:]
    num_groups = k_NGD.shape[1]
    repeat = num_heads // num_groups
    dout = dout_NHD.contiguous()
    delta_NH = (dout.to(float32) * out_NHD.to(float32)).sum(-1)
    dq, dk, dv = q_NHD.new_zeros(q_NHD.shape), k_NGD.new_zeros(k_NGD.shape), v_NGD.new_zeros(v_NGD.shape)
    rows, keys = (64, 64) if width <= 128 else (32, 32)
    strides = (q_NHD.stride(0), k_NGD.stride(0), v_NGD.stride(0))
    scales = (scale_of(width), width**-0.5)
    fixed = {"REPEAT": repeat, "ROWS": rows, "WIDTH": width, "KEYS": keys, "num_warps": 4, "num_stages": 2}
    longest = max(1, longest)
    _keys_gradient[(triton.cdiv(longest, keys), num_groups, len(first_B))](
        q_NHD, k_NGD, v_NGD, dout, lse_NH, delta_NH, dk, dv, first_B, length_B, *strides, *scales,
        num_heads, num_groups, **fixed,
    )  # fmt: skip
    _queries_gradient[(triton.cdiv(longest * repeat, rows), num_groups, len(first_B))](
        q_NHD, k_NGD, v_NGD, dout, lse_NH, delta_NH, dq, first_B, length_B, *strides, *scales, num_heads, **fixed,
    )  # fmt: skip
    return dq, dk, dv
