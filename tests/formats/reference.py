"""A second, slow definition of the project's own quantizers in numpy: tables and searches instead of bit tricks.

Shares no code with `onegrid.formats` but the rows of its tables. Every FP32 operation is one numpy float32 operation,
which rounds to nearest even and keeps subnormals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onegrid.formats import E4M3

F = np.float32
FLT_MAX = np.finfo(F).max
E8M0_VALUES = np.ldexp(1.0, np.arange(255) - 127)  # FP64, exact
RECIPROCAL = {448.0: F(1) / F(448), 57344.0: F(1) / F(57344), 6.0: F(1) / F(6)}
NAN = np.array(0x7FC00000, np.uint32).view(F)


@dataclass
class Reference:
    codes: np.ndarray  # uint8 [M, K], 4-bit codes unpacked
    scales: np.ndarray  # grid
    decoded: np.ndarray  # FP32 [M, K]
    amax: np.ndarray | None


def magnitudes(fmt) -> np.ndarray:
    """Values of the non-negative finite codes, ascending: index = code."""
    values = []
    for code in range(1 << (fmt.bits - 1)):
        exponent, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
        fraction = mantissa / (1 << fmt.mantissa_bits)
        value = (fraction if exponent == 0 else 1 + fraction) * 2.0 ** (max(exponent, 1) - fmt.bias)
        if value <= fmt.max:
            values.append(value)
    return np.array(values)


def encode(y: np.ndarray, fmt) -> np.ndarray:
    """uint8 codes by looking for the nearest value; a tie goes to the even code."""
    values = magnitudes(fmt)
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(y.astype(np.float64))
    index = np.searchsorted(middles, np.nan_to_num(size, nan=0.0))
    tie = (index < len(middles)) & (middles[np.minimum(index, len(middles) - 1)] == size)
    index = np.where(tie & (index % 2 == 1), index + 1, index)
    codes = index + np.where(np.signbit(y), 1 << (fmt.bits - 1), 0)
    nan = len(values) - 1 if fmt.bits == 4 else 0x7F
    return np.where(np.isnan(y), nan, codes).astype(np.uint8)


def values_of(codes: np.ndarray, fmt) -> np.ndarray:
    table = np.full(1 << (fmt.bits - 1), NAN, F)
    values = magnitudes(fmt)
    table[: len(values)] = values
    size = table[codes & ((1 << (fmt.bits - 1)) - 1)]
    return np.where((codes >> (fmt.bits - 1)) == 1, -size, size).astype(F)


def quantize(x: np.ndarray, q, axis: int = -1, amax=None, input_max: float = FLT_MAX) -> Reference:
    """x FP32 [M, K]; amax as for the project's function."""
    if axis == -2 and q.block[0] != q.block[1]:
        turned = quantize(x.T, q, -1, amax, input_max)
        return Reference(turned.codes.T.copy(), turned.scales.T.copy(), turned.decoded.T.copy(), turned.amax)
    with np.errstate(all="ignore"):
        return _quantize(x, q, amax, F(input_max))


def _quantize(x, q, amax, input_max) -> Reference:
    rows, columns = x.shape
    height, width = q.block[0] or max(rows, 1), q.block[1] or max(columns, 1)
    grid_rows = 1 if q.block[0] is None else -(-rows // height)
    grid_columns = 1 if q.block[1] is None else -(-columns // width)
    padded = np.zeros((grid_rows * height, grid_columns * width), F)
    padded[:rows, :columns] = x
    blocks = padded.reshape(grid_rows, height, grid_columns, width).swapaxes(1, 2)  # [i, j, h, w]
    sizes = np.where(np.isnan(blocks), F(0), np.abs(blocks))
    block_amax = sizes.max((2, 3), initial=F(0))
    whole = None
    if q.span == "tensor":
        whole = block_amax.max(initial=F(0)) if amax is None else F(amax)
    elif q.span == "row":
        whole = block_amax.max(1, initial=F(0)) if amax is None else np.asarray(amax, F)
    a = whole[:, None] if q.span == "row" else whole
    scales, multiplier, value = _scales(blocks, block_amax, a, q, input_max)
    codes = encode(blocks * multiplier[:, :, None, None], q.fmt)
    decoded = values_of(codes, q.fmt) * value[:, :, None, None]
    decoded[np.isnan(decoded)] = NAN

    def flat(tiles):
        return tiles.swapaxes(1, 2).reshape(padded.shape)[:rows, :columns].copy()

    scales = scales[0, 0] if q.block == (None, None) else scales
    return Reference(flat(codes), np.asarray(scales), flat(decoded), whole if q.scale == "e4m3" else None)


def _scales(blocks, block_amax, a, q, input_max):
    """(stored scales, multipliers of the data, values of the stored scales), one per block."""
    if q.scale == "e8m0":
        t = block_amax * RECIPROCAL[q.fmt.max]
        b = np.minimum(np.searchsorted(E8M0_VALUES, t.astype(np.float64)), 254)
        return b.astype(np.uint8), E8M0_VALUES[254 - b].astype(F), E8M0_VALUES[b].astype(F)
    if q.scale == "fp32":
        top = block_amax if a is None else np.broadcast_to(a, block_amax.shape).astype(F)
        s = F(q.fmt.max) / top
        s = np.where(np.isinf(s), input_max if q.rule == "fp8_block" else FLT_MAX, s).astype(F)
        if q.pow2:
            s = np.ldexp(F(0.5), np.frexp(s)[1])
        s = np.where((top == 0) | ~np.isfinite(top), F(1), s).astype(F)
        return F(1) / s, s, F(1) / s
    enc = np.minimum(F(6 * q.scale_max) / a, FLT_MAX)
    enc = np.where((a == 0) | (enc == 0), F(1), enc).astype(F)
    dec = F(1) / enc
    if not q.four_over_six:
        s = encode(np.minimum(block_amax * (enc * RECIPROCAL[6.0]), FLT_MAX), E4M3)
        value = values_of(s, E4M3)
        return s, np.minimum(F(1) / (value * dec), FLT_MAX), value
    base = (block_amax / F(6)) * enc
    arms = []
    for target in (base * F(1.5), base):
        s = encode(np.minimum(target, F(448)), E4M3)
        value = values_of(s, E4M3)
        multiplier = np.minimum(F(1) / (value * dec), FLT_MAX)
        total = np.zeros(blocks.shape[:3], F)
        for k in range(blocks.shape[3]):
            element = blocks[..., k]
            code = values_of(encode(element * multiplier[..., None], q.fmt), q.fmt)
            whole = a if np.ndim(a) == 0 else a[..., None]
            difference = ((code * value[..., None]) * whole) / F(6 * q.scale_max) - element
            total = total + (np.abs(difference) if q.four_over_six == "mae" else difference * difference)
        while total.shape[2] > 1:
            half = total.shape[2] // 2
            total = total[:, :, :half] + total[:, :, half:]
        arms.append((total[:, :, 0], s, multiplier, value))
    (error_4, *four), (error_6, *six) = arms
    return tuple(np.where(error_4 < error_6, one, other) for one, other in zip(four, six, strict=True))
