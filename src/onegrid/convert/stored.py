"""From the tensors of a layout to codes and scales, and back: the same bytes, under other names.

The global scale of NVFP4 is one number on disk and an amax here. The number is a rounded quotient, so several amax
values give it; among them the BF16 one is taken, since weights are BF16 before they are quantized, and it is unique:
neighbours of a BF16 value differ by 2^-8, the quotient's rounding by 2^-24.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from onegrid.convert.by_rows import dequantize_by_rows, require_finite
from onegrid.convert.layouts import Layout, grid_shape, scale_shape
from onegrid.errors import NonFiniteError, WeightsError
from onegrid.formats import E4M3, QUANTIZERS, Quantizer, QuantTensor
from onegrid.formats.casts import decode_elements, divide, e8m0_decode, encode_elements
from onegrid.formats.quantize import Stats
from onegrid.formats.scales import global_encode

LARGEST_BF16 = torch.finfo(torch.bfloat16).max
_CODES = {torch.float8_e4m3fn, torch.uint8}
_WIDE = {torch.float32, torch.bfloat16, torch.float16}


def quant_tensor(
    name: str, quantizer: Quantizer, codes: Tensor, scales: Tensor, global_scale: Tensor | None, *, sense: str
) -> QuantTensor:
    """Codes and scales as read from a checkpoint.

    codes         F8_E4M3 [N, K], or U8 [N, K/2] for 4 bits
    scales        any of the shapes of the layouts; F32, BF16 and F16 are upcast, E8M0 is read as its byte
    global_scale  one number, for NVFP4; `sense` says whether decoding multiplies or divides by it
    Raises WeightsError for a wrong dtype or shape, NonFiniteError for NaN codes or scales that are not finite.
    """
    if codes.dtype not in _CODES or codes.dim() != 2:
        raise WeightsError(
            f"{name} has dtype {codes.dtype} and shape {tuple(codes.shape)}; codes are F8_E4M3 or U8 [N, K]"
        )
    raw = codes.contiguous().view(torch.uint8)
    shape = (raw.shape[0], raw.shape[1] * (2 if quantizer.fmt.bits == 4 else 1))
    if quantizer.fmt.bits == 8:
        num_nan = int(((raw & 0x7F) == 0x7F).sum())
        if num_nan:
            raise NonFiniteError(f"{name} has {num_nan} NaN codes among {raw.numel()}")
    grid, values = read_scales(name, quantizer, scales, shape)
    amax, factor = read_global(name, quantizer, global_scale, sense)
    none = torch.zeros((), dtype=torch.int64)
    q = QuantTensor(raw, grid, amax, factor, shape, quantizer, -1, Stats(none, none, none))
    if values.numel():
        _refuse_dead_blocks(name, q)
        if float(values.amax()) * quantizer.fmt.max * (1.0 if factor is None else float(factor)) > LARGEST_BF16:
            require_finite(name, dequantize_by_rows(q, torch.bfloat16))
    return q


def _refuse_dead_blocks(name: str, q: QuantTensor) -> None:
    """WeightsError for FP32 scales of 0 over codes that are not: such weights would vanish in silence.

    Zero blocks may have a scale of 0; so may blocks of NVFP4 that are too small for their tensor's range.
    """
    if q.quantizer.scale != "fp32" or bool(q.scales.all()):
        return
    dead = (q.scales == 0).reshape(grid_shape(q.shape, q.quantizer.block))
    for axis, (size, extent) in enumerate(zip(q.quantizer.block, q.shape, strict=True)):
        dead = dead.repeat_interleave(extent if size is None else size, axis).narrow(axis, 0, extent)
    lost = int((dead & ((q.codes & 0x7F) != 0)).sum())
    if lost:
        num = int((q.scales == 0).sum())
        raise WeightsError(
            f"{num} scales of {name} are 0, and {lost} codes below them are not: these weights would be lost; "
            f"export the checkpoint again with its scales"
        )


SCALE_DTYPES = {
    "fp32": ("F32", "BF16", "F16", "F8_E8M0"),
    "e8m0": ("U8", "F8_E8M0"),
    "e4m3": ("F8_E4M3",),
}
"""Kind of scale -> element types of safetensors that may hold it."""


def check_scales(name: str, quantizer: Quantizer, found: tuple[int, ...], shape: tuple[int, int]) -> None:
    """WeightsError unless scales of this shape can belong to a weight of `shape`."""
    rows, columns = grid_shape(shape, quantizer.block)
    wanted = {(rows, columns), (rows, 1, columns, 1)}
    if columns == 1:
        wanted.add((rows,))
    if rows == columns == 1:
        wanted |= {(), (1,)}
    if found not in wanted:
        raise WeightsError(
            f"the scales of {name} have shape {found}; {quantizer} has {rows} x {columns} "
            f"for a weight of {shape[0]} x {shape[1]}"
        )


def read_scales(name: str, quantizer: Quantizer, scales: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Scales in the shape and dtype of `QuantTensor.scales`, and as FP32 numbers."""
    check_scales(name, quantizer, tuple(scales.shape), shape)
    rows, columns = grid_shape(shape, quantizer.block)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.contiguous().view(torch.uint8)
        if quantizer.scale == "fp32":
            scales = e8m0_decode(scales)
    dtypes = {"fp32": _WIDE, "e8m0": {torch.uint8}, "e4m3": {torch.float8_e4m3fn}}[quantizer.scale]
    if scales.dtype not in dtypes:
        raise WeightsError(
            f"the scales of {name} have dtype {scales.dtype}; those of {quantizer} are {quantizer.scale}"
        )
    grid = scales.float() if quantizer.scale == "fp32" else scales.contiguous().view(torch.uint8)
    values = {"fp32": lambda g: g, "e8m0": e8m0_decode, "e4m3": lambda g: decode_elements(g, E4M3)}[quantizer.scale](
        grid
    )
    num_bad = int((~(values.isfinite() & (values >= 0))).sum())
    if num_bad:
        raise NonFiniteError(f"{num_bad} scales of {name} are NaN, Inf or negative, among {values.numel()}")
    shaped = grid.reshape(()) if quantizer.block == (None, None) else grid.reshape(rows, columns).contiguous()
    return shaped, values


def read_global(
    name: str, quantizer: Quantizer, number: Tensor | None, sense: str
) -> tuple[Tensor | None, Tensor | None]:
    """Amax and decode multiplier of a global scale."""
    if not quantizer.has_amax:
        return None, None
    if number is None or number.numel() != 1 or number.dtype not in _WIDE:
        told = "absent" if number is None else f"{tuple(number.shape)} {number.dtype}"
        raise WeightsError(f"the global scale of {name} is {told}; {quantizer} has one FP32 number")
    value = number.float().reshape(())
    if not bool(value.isfinite()) or not float(value) > 0:
        raise NonFiniteError(f"the global scale of {name} is {float(value)}; it must be finite and above 0")
    constant = 6.0 * quantizer.scale_max
    near = value * constant if sense == "multiplier" else divide(constant, value)
    rounded = near.bfloat16().float()
    encode = global_encode(rounded, quantizer)
    if sense == "divisor":
        amax = rounded if bool(encode == value) else near
        return amax, divide(1.0, value)
    exact = bool(divide(1.0, encode) == value) or bool(divide(rounded, torch.tensor(constant)) == value)
    return (rounded if exact else near), value


def parts_on_disk(q: QuantTensor, row: Layout) -> dict[str, Tensor]:
    """Suffix -> tensor of a weight in a layout. Block scales of tiles are written out for every row."""
    dtypes = {"F32": torch.float32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
    scales = q.scales
    across = q.quantizer.block[0]
    if row.scales_dtype != "F32" and across is not None and across > 1:
        scales = scales.repeat_interleave(across, 0)[: q.shape[0]]
    stored = scales.contiguous().reshape(scale_shape(row, q.shape, q.quantizer))
    parts = {
        row.codes: q.codes if row.packed else q.codes.view(torch.float8_e4m3fn),
        row.scales: stored if stored.dtype == dtypes[row.scales_dtype] else stored.view(dtypes[row.scales_dtype]),
    }
    numbers = (1,) if row.method == "compressed-tensors" else ()
    if row.global_scale is not None:
        assert q.amax is not None and q.factor is not None
        number = q.factor if row.sense == "multiplier" else global_encode(q.amax, q.quantizer)
        parts[row.global_scale] = number.float().reshape(numbers)
    if row.input_scale is not None:
        parts[row.input_scale] = torch.ones(numbers)
    return parts


def with_amax(q: QuantTensor, amax: Tensor) -> QuantTensor:
    """NVFP4 under another global amax: codes stay, block scales are multiplied by own / new and rounded to E4M3.

    With the tensor's own amax nothing changes, to the byte. Else a block scale moves by at most half an E4M3 step, or
    falls to 0 where it was 2^-10 of the new range.
    """
    assert q.amax is not None
    if bool(q.amax == amax):
        return q
    scales = encode_elements(decode_elements(q.scales, E4M3) * divide(q.amax, amax), E4M3)
    factor = divide(1.0, global_encode(amax, q.quantizer))
    return replace(q, scales=scales, amax=amax, factor=factor)


def as_mxfp8(q: QuantTensor) -> QuantTensor:
    """FP8 blocks with power-of-two scales as MXFP8: the same codes, the exponent of each scale as byte, every 32 of K.

    Raises WeightsError for a scale that is not a power of two in the range of E8M0.
    """
    bits = q.scales.view(torch.int32)
    plain, tiny = (bits & 0x007FFFFF) == 0, bits == 0x00400000  # 2^-127 is subnormal in FP32
    if not bool((plain & (bits > 0) | tiny).all()):
        raise WeightsError("FP8 block scales are not all powers of two; MXFP8 has no others")
    exponents = torch.where(tiny, 0, bits >> 23).to(torch.uint8)
    across, along = (int(size or 1) for size in q.quantizer.block)
    rows, columns = q.shape[0], -(-q.shape[1] // 32)
    grid = exponents.repeat_interleave(across, 0)[:rows].repeat_interleave(along // 32, 1)[:, :columns]
    return replace(q, scales=grid.contiguous(), quantizer=QUANTIZERS["mxfp8"])


def is_power_of_two(scales: Tensor) -> bool:
    """Whether every FP32 number is a power of two (subnormals aside from 2^-127 are not)."""
    bits = scales.view(torch.int32)
    return bool((((bits & 0x007FFFFF) == 0) & (bits > 0) | (bits == 0x00400000)).all())
