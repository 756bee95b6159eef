"""Element casts: FP32 to E4M3, E5M2, E2M1 and E8M0 and back, with one stated rule on every device and torch version.

Nothing here uses `.to(float8)`: what that does above the maximum depends on the torch version. Rounding adds and
takes away a power of two that fits the element's exponent, which is round-to-nearest-even by the FP32 adder itself;
codes come from FP32 bits. No value ever depends on subnormal arithmetic except where the input is itself subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FLT_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Format:
    """An element format: sign, exponent and mantissa bits. Every code of E2M1 is finite; E4M3 has one NaN per sign."""

    name: str
    bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_exponent: int
    """Exponent of `max`."""
    saturates_at: float
    """A scaled value counts as saturated from this magnitude on: it is beyond what rounding alone brings to `max`."""
    nan_code: int | None
    """Code that a NaN gets, with the sign lost; None where the format has no NaN (E2M1 stores +max)."""

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; below it the step stays the same."""
        return 1 - self.bias

    @property
    def step(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    def finite_codes(self, device: torch.device | str = "cpu") -> Tensor:
        """All finite codes as uint8, ascending."""
        codes_N = torch.arange(1 << self.bits, device=device)
        return codes_N[decode_elements(codes_N.to(torch.uint8), self).isfinite()].to(torch.uint8)

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", 8, 3, 7, 448.0, 8, 464.0 + 2.0**-15, 0x7F)  # the tie 464 still rounds to 448
E5M2 = Format("e5m2", 8, 2, 15, 57344.0, 15, 61440.0, 0x7F)
E2M1 = Format("e2m1", 4, 1, 1, 6.0, 2, 7.0, None)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1)}


def round_magnitude_(magnitude: Tensor, fmt: Format) -> Tensor:
    """Round to the nearest value of `fmt`, ties to even, and saturate; **`magnitude` is overwritten** and returned.

    magnitude  FP32 >= 0 of any shape. Inf gives the maximum; NaN stays NaN, also where the format has none.
    Source: `cvt.rn.satfinite` of the PTX manual.
    """
    # Adding the power of two 23 - mantissa_bits above a value's exponent leaves exactly the element's mantissa bits,
    # and the FP32 adder rounds them. The clamp also keeps an earlier product apart from this sum: no multiply-add.
    magnitude = magnitude.clamp_(max=fmt.max)
    smallest_anchor = 2.0 ** (fmt.min_exponent + 23 - fmt.mantissa_bits)
    anchor = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
    anchor = anchor.mul_(2.0 ** (23 - fmt.mantissa_bits)).clamp_(min=smallest_anchor)
    return magnitude.add_(anchor).sub_(anchor)


def round_elements(y: Tensor, fmt: Format) -> Tensor:
    """The values of `fmt` nearest to FP32 `y`, ties to even.

    Above the maximum and Inf saturate; NaN stays NaN in E4M3 and E5M2 and becomes +max in E2M1; the sign of zero and
    of values that underflow is kept.
    """
    nan = fmt.max if fmt.nan_code is None else torch.nan  # one NaN, without the sign
    y = y.nan_to_num(nan=nan, posinf=torch.inf, neginf=-torch.inf)
    return round_magnitude_(y.abs(), fmt).copysign_(y)


def encode_exact(values: Tensor, fmt: Format) -> Tensor:
    """uint8 codes (4-bit codes unpacked) of FP32 values that lie on the grid of `fmt`; NaN (sign clear) its code."""
    bits = values.view(torch.int32)
    shift, smallest_normal = 23 - fmt.mantissa_bits, (fmt.min_exponent + 127) << 23
    normal = ((bits & 0x7FFFFFFF) - (smallest_normal - (1 << 23))) >> shift
    # Below the smallest normal value N the code is the mantissa of |v| + N. Each of the two is the larger in its range.
    below = ((values.abs() + 2.0**fmt.min_exponent).view(torch.int32) - smallest_normal) >> shift
    codes = torch.maximum(normal, below).clamp_(max=fmt.nan_code or fmt.sign_bit - 1)
    return (codes | ((bits >> (32 - fmt.bits)) & fmt.sign_bit)).to(torch.uint8)


def encode_elements(y: Tensor, fmt: Format) -> Tensor:
    """uint8 codes of FP32 values, rounded as `round_elements` does; 4-bit codes are not packed."""
    return encode_exact(round_elements(y.float(), fmt), fmt)


def decode_elements(codes: Tensor, fmt: Format) -> Tensor:
    """FP32 values of uint8 codes (4-bit codes unpacked), every code, NaN and Inf of E5M2 included."""
    if codes.device.type == "cpu" and not torch.compiler.is_compiling():  # a look-up is many times faster there
        return _table(fmt).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
    return _decoded(codes, fmt)


@lru_cache(maxsize=16)
def _table(fmt: Format) -> Tensor:
    return _decoded(torch.arange(256, dtype=torch.uint8), fmt)


def _decoded(codes: Tensor, fmt: Format) -> Tensor:
    wide = codes.to(torch.int32)
    magnitude = wide & (fmt.sign_bit - 1)
    normal = ((magnitude << (23 - fmt.mantissa_bits)) + ((127 - fmt.bias) << 23)).view(torch.float32)
    values = torch.where(magnitude < (1 << fmt.mantissa_bits), magnitude.float() * fmt.step, normal)
    if fmt is E4M3:
        values = torch.where(magnitude == 0x7F, torch.nan, values)
    if fmt is E5M2:
        values = torch.where(magnitude == 0x7C, torch.inf, torch.where(magnitude > 0x7C, torch.nan, values))
    return torch.where((wide & fmt.sign_bit) != 0, -values, values)


def e8m0_up(values: Tensor) -> Tensor:
    """uint8 byte b, the smallest with 2^(b-127) >= |value|; Inf gives 254, NaN 255, 0 and all up to 2^-127 give 0.

    Source: `cvt.rp.satfinite.ue8m0x2` of the PTX manual.
    """
    bits = values.view(torch.int32) & 0x7FFFFFFF
    up = (((bits - 1) >> 23) + 1).clamp_(max=254)
    up = torch.where(bits <= 0x400000, 0, up)  # at most 2^-127
    return torch.where(bits > 0x7F800000, 255, up).to(torch.uint8)


def e8m0_decode(scales: Tensor) -> Tensor:
    """FP32 value 2^(b-127) of uint8 bytes; byte 0 is the subnormal 2^-127 and byte 255 is NaN."""
    bits = (scales.to(torch.int32) << 23).clamp_(min=0x00400000)
    return torch.where(bits == 0x7F800000, 0x7FC00000, bits).view(torch.float32)


def e8m0_inverse(scales: Tensor) -> Tensor:
    """FP32 value 2^(127-b) of uint8 bytes; byte 254 gives the subnormal 2^-127 and byte 255 NaN."""
    wide = scales.to(torch.int32)
    bits = ((254 - wide) << 23).clamp_(min=0x00400000)
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)


def divide(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """Correctly rounded FP32 quotient of two FP32 numbers, also when compiled.

    The quotient is taken in FP64 and rounded to FP32. With p = 24 and 53 >= 2p + 2 bits the second rounding never
    changes the result for a quotient in the normal range (Figueroa, "When is double rounding innocuous?", 1995).
    A quotient in FP32's subnormal range keeps fewer bits, so there it is innocuous too.
    """
    wide = denominator.double()
    top = numerator.double() if isinstance(numerator, Tensor) else torch.full_like(wide, numerator)
    return torch.div(top, wide).float()


def round_bf16(values: Tensor) -> Tensor:
    """FP32 values rounded to BF16 precision, ties to even, by their bits: compilers drop a cast there and back."""
    bits = values.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return torch.where(values.isfinite(), rounded, bits).view(torch.float32)
