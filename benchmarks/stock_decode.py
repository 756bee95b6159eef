"""Decode attention as engines without a promise have it: the library's, which splits keys as it likes. For
`pins_price.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def stock_slots(q_NHD, k_NGD, v_NGD, keys_SGLD, values_SGLD, position_N, *, num_keys):
    """`packed_attention.triton_slots` with the library's attention over the first keys, whatever the position."""
    rows, groups, width = k_NGD.shape
    _store[(rows, groups)](
        k_NGD, v_NGD, keys_SGLD, values_SGLD, position_N, k_NGD.stride(0), v_NGD.stride(0), *keys_SGLD.stride()[:3],
        WIDTH=width, num_warps=1,
    )  # fmt: skip
    out = torch.nn.functional.scaled_dot_product_attention(
        q_NHD.unsqueeze(2), keys_SGLD[:rows, :, :num_keys], values_SGLD[:rows, :, :num_keys], enable_gqa=True
    )
    return out.squeeze(2)


@triton.jit
def _store(k, v, keys, values, position, stride_k, stride_v, stride_s, stride_g, stride_l, WIDTH: tl.constexpr):
    """One new key and value a slot in one kernel, as engines with a library's attention have it."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    at = row * stride_s + group * stride_g + tl.load(position + row) * stride_l + d
    tl.store(keys + at, tl.load(k + row * stride_k + group * WIDTH + d))
    tl.store(values + at, tl.load(v + row * stride_v + group * WIDTH + d))
