"""Scale rules of other engines, so that a mismatch with one of them can be reproduced and measured.

Where an engine takes a logarithm in FP32, the rule here takes the exponent from the bits of the same quotient: equal
for BF16 inputs, while for FP32 inputs a logarithm can round across a power of two. Where an engine uses the GPU's
approximate reciprocal, the rule here rounds correctly, which on some chips differs by one unit in the last place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onegrid.formats import scales
from onegrid.formats.casts import (
    E2M1,
    E4M3,
    FLT_MAX,
    divide,
    e8m0_decode,
    e8m0_inverse,
    e8m0_up,
    encode_exact,
    round_bf16,
    round_elements,
)
from onegrid.formats.scales import RECIPROCAL, Rule, Scaling, from_e8m0, global_encode
from onegrid.formats.table import Quantizer

Grid = Tensor
SCALE_INV = 0.00037202382110990584  # RN(1/2688), 0x39C30C31


def _over_max(amax_G: Grid, quantizer: Quantizer) -> Grid:
    return divide(amax_G, torch.full_like(amax_G, quantizer.fmt.max))


def _from_exponent(field_G: Tensor, amax_G: Grid) -> Scaling:
    """Bytes from unclamped biased exponents; a NaN amax gives 255. Byte 0 is used as if it were 1 on the data."""
    bytes_G = torch.where(amax_G.isnan(), 255, field_G.clamp(0, 255)).to(torch.uint8)
    return Scaling(bytes_G, e8m0_inverse(bytes_G.clamp(min=1)), e8m0_decode(bytes_G))


def mx_floor(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """floor(log2 amax) - max exponent: up to 12.5 % (E4M3) of a block's largest value is clipped."""
    return _from_exponent((amax_G.view(torch.int32) >> 23) - quantizer.fmt.max_exponent, amax_G)


def mx_ceil(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """ceil(log2 amax) - max exponent: never clips, wastes up to one bit."""
    bits = amax_G.view(torch.int32)
    up = ((bits & 0x7FFFFF) > 0).to(torch.int32)
    return _from_exponent((bits >> 23) + up - quantizer.fmt.max_exponent, amax_G)


def mx_even(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """As `mx_floor`, of an amax that was first rounded to the element's mantissa bits."""
    return _even(amax_G, quantizer.fmt.mantissa_bits, quantizer)


def mx_even_fp4(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """As `mx_even` with the mantissa width of E2M1 always. Its wrong bytes for amax >= 2.99e38 are not kept."""
    return _even(amax_G, E2M1.mantissa_bits, quantizer)


def _even(amax_G: Grid, mantissa_bits: int, quantizer: Quantizer) -> Scaling:
    half = 1 << (22 - mantissa_bits)
    carried = (amax_G.view(torch.int32).clamp(max=0x7F800000 - half) + half) >> 23
    return _from_exponent(carried - quantizer.fmt.max_exponent, amax_G)


def mx_rceil(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """ceil(log2(amax / max)); data of a block with byte 0 stay unscaled."""
    scaling = from_e8m0(e8m0_up(_over_max(amax_G, quantizer)))
    return replace(scaling, encode=torch.where(scaling.scales == 0, 1.0, scaling.encode))


def mx_divided(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """ceil(log2(amax / max)), as the project's rule except for NaN."""
    return from_e8m0(e8m0_up(_over_max(amax_G, quantizer)))


def mx_bits(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """(bits(amax / max) + 0x7FFFFF) >> 23: 1 instead of 0 for tiny blocks; a zero block is multiplied by 0."""
    quotient_G = _over_max(amax_G, quantizer)
    bytes_G = ((quotient_G.nan_to_num(nan=0.0, posinf=torch.inf).view(torch.int32) - 1) >> 23) + 1
    scaling = from_e8m0(torch.where(amax_G.isnan(), 255, bytes_G).to(torch.uint8))
    return replace(scaling, encode=torch.where(scaling.scales == 0, 0.0, scaling.encode))


def mx_flashinfer(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """The project's bytes, with a multiplier of 0 at bytes 0 and 254."""
    scaling = from_e8m0(e8m0_up(amax_G * RECIPROCAL[quantizer.fmt.name]))
    at_the_end = (scaling.scales == 0) | (scaling.scales == 254)
    return replace(scaling, encode=torch.where(at_the_end, 0.0, scaling.encode))


def mx_deepgemm(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """amax floored at 1e-4, then rounded up to a power of two."""
    return from_e8m0(e8m0_up(_over_max(amax_G.clamp(min=1e-4), quantizer)))


def _nvfp4(block_G: Grid, encode_G: Grid, *, divides: bool = False) -> Scaling:
    return Scaling(encode_exact(block_G, E4M3), encode_G, block_G, divides)


def nvfp4_fast(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """S_enc (amax RN(1/6)), another order of products; an underflowed block is multiplied by 0."""
    assert global_amax_G is not None
    encode_G = global_encode(global_amax_G, quantizer)
    block_G = round_elements(encode_G * (amax_G * RECIPROCAL["e2m1"]), E4M3)
    inverse_G = divide(1.0, block_G * divide(1.0, encode_G))
    return _nvfp4(block_G, torch.where(block_G == 0, 0.0, inverse_G))


def nvfp4_exact(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """The project's rule, with a multiplier of 0 for a zero block."""
    scaling = scales.nvfp4(amax_G, global_amax_G, quantizer, dtype)
    return replace(scaling, encode=torch.where(amax_G == 0, 0.0, scaling.encode))


def nvfp4_exact_row(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """As `nvfp4_exact`, with S_enc = RN(RN(1 / RN(1/2688)) / A)."""
    assert global_amax_G is not None
    top_G = divide(1.0, torch.full_like(global_amax_G, SCALE_INV))
    encode_G = divide(top_G, global_amax_G).clamp(max=FLT_MAX)
    encode_G = torch.where(encode_G == 0, 1.0, encode_G)
    block_G = round_elements((amax_G * (encode_G * RECIPROCAL["e2m1"])).clamp(max=FLT_MAX), E4M3)
    inverse_G = divide(1.0, block_G * divide(1.0, encode_G)).clamp(max=FLT_MAX)
    return _nvfp4(block_G, torch.where(amax_G == 0, 0.0, inverse_G))


def nvfp4_ref(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """As `nvfp4_fast`, but data of an underflowed block are multiplied by 1."""
    scaling = nvfp4_fast(amax_G, global_amax_G, quantizer, dtype)
    return replace(scaling, encode=torch.where(scaling.decode == 0, 1.0, scaling.encode))


def nvfp4_modelopt(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """amax / (6 RN(A/2688)), a zero block 1, clamped to [2^-9, 448]; data are divided."""
    assert global_amax_G is not None
    outer_G = divide(global_amax_G, torch.full_like(global_amax_G, 6.0 * quantizer.scale_max))
    ratio_G = divide(amax_G, (6.0 * outer_G).expand_as(amax_G))
    ratio_G = torch.where((amax_G == 0) | (outer_G == 0), 1.0, ratio_G).clamp(2.0**-9, 448.0)
    block_G = round_elements(ratio_G, E4M3)
    product_G = block_G * outer_G
    return _nvfp4(block_G, torch.where(product_G == 0, 1.0, product_G), divides=True)


def nvfp4_torchao(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """(amax / 6) / RN(A/2688) clamped to [2^-6, 448]; data times (1 / RN(A/2688)) / scale."""
    assert global_amax_G is not None
    outer_G = divide(global_amax_G, torch.full_like(global_amax_G, 6.0 * quantizer.scale_max))
    ratio_G = divide(divide(amax_G, torch.full_like(amax_G, 6.0)), outer_G.expand_as(amax_G))
    block_G = round_elements(torch.where(outer_G == 0, 0.0, ratio_G).clamp(2.0**-6, 448.0), E4M3)
    encode_G = divide(divide(1.0, outer_G).expand_as(block_G), block_G)
    return _nvfp4(block_G, torch.where(outer_G == 0, 1.0, encode_G))


def nvfp4_compressed_tensors(
    amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype
) -> Scaling:
    """S_enc (amax / 6) with every step rounded to the tensor's dtype; a zero block 0.125; data / (scale / S_enc)."""
    assert global_amax_G is not None
    encode_G = global_encode(global_amax_G, quantizer)
    sixth_G = divide(amax_G, torch.full_like(amax_G, 6.0))
    product_G = round_bf16(encode_G * round_bf16(sixth_G)) if dtype == torch.bfloat16 else encode_G * sixth_G
    block_G = round_elements(product_G, E4M3)
    block_G = torch.where(block_G == 0, 0.125, block_G)
    return _nvfp4(block_G, divide(block_G, encode_G.expand_as(block_G)), divides=True)


def fp8_deepgemm(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """Decode multiplier first: max(amax, 1e-4) / 448, rounded up to a power of two if asked; data times its inverse."""
    scales_G = _over_max(amax_G.clamp(min=1e-4), quantizer)
    if quantizer.pow2:
        scales_G = e8m0_decode(e8m0_up(scales_G))
    return Scaling(scales_G, divide(1.0, scales_G), scales_G)


def fp8_divided(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """Decode multiplier amax / 448, data times its rounded inverse; 1 for a zero amax."""
    scales_G = torch.where(amax_G == 0, 1.0, _over_max(amax_G, quantizer))
    return Scaling(scales_G, divide(1.0, scales_G).clamp(max=FLT_MAX), scales_G)


def fp8_nemo_rl(amax_G: Grid, global_amax_G: Grid | None, quantizer: Quantizer, dtype: torch.dtype) -> Scaling:
    """As `fp8_block`, with 448 / amax taken as RN(RN(1 / amax) 448)."""
    encode_G = (divide(1.0, amax_G) * quantizer.fmt.max).clamp(max=FLT_MAX)
    encode_G = torch.where((amax_G > 0) & (amax_G < torch.inf), encode_G, 1.0)
    scales_G = divide(1.0, encode_G)
    return Scaling(scales_G, encode_G, scales_G)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        mx_floor,
        mx_ceil,
        mx_even,
        mx_even_fp4,
        mx_rceil,
        mx_divided,
        mx_bits,
        mx_flashinfer,
        mx_deepgemm,
        nvfp4_fast,
        nvfp4_exact,
        nvfp4_exact_row,
        nvfp4_ref,
        nvfp4_modelopt,
        nvfp4_torchao,
        nvfp4_compressed_tensors,
        fp8_deepgemm,
        fp8_divided,
        fp8_nemo_rl,
    )
}
