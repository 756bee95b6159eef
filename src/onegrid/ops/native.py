"""FP8 products by the matrix units themselves, where a plan asks for them: recipe.matmul = "native".

    blocks   codes of 1 x 128 and 128 x 128 with their FP32 scales, a partial sum per 128 of K
    rows     codes with a scale per row on both sides
    tensor   codes with one scale on each side

Another function than the grid matmul, with rows of its own in `ops.table`: on Hopper a partial sum keeps 13 bits
(numerics.md, section 9.1), so values differ from those of the grid, by some 1e-4 of their size, and both sides must
take the same. What is quantized and how is the same: codes and scales have the bytes of `formats.quantize`.

Layout: values are float8 [M, K] with K contiguous. Scales of 1 x 128 blocks are [M, K / 128] with M contiguous, as the
library wants them; those of tiles are [M / 128, K / 128].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import QUANTIZERS, Quantizer, QuantTensor, quantize
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up

BLOCK = 128
MULTIPLE = 4 * BLOCK
"""The library takes tile scales in groups of four, so widths and heights of tiled weights are multiples of this."""
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def is_native(kind: str) -> bool:
    """Whether an operand's kind is one of this file's."""
    return kind.startswith("native_")


def refusal(quantizer: Quantizer, activation: Quantizer, shape: tuple[int, ...], device: torch.device) -> str:
    """Why weights [N, K] and inputs in these formats have no native matmul on this device; "" where they have one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"native FP8 products were written for Hopper GPUs (compute capability 9.0); the device is {device}"
    if quantizer.scale != "fp32" or quantizer.fmt.bits != 8 or QUANTIZERS.get(quantizer.name) is not quantizer:
        return f"{quantizer} has no native matmul there; FP8 with FP32 scales by tensor, row or block has"
    blocks = ((BLOCK, BLOCK), (1, BLOCK)) if quantizer.span == "none" else (quantizer.block, quantizer.block)
    if (quantizer.block, activation.block) != blocks or activation.scale != "fp32":
        return f"weights in {quantizer} and inputs in {activation} have no native matmul there"
    multiple = MULTIPLE if quantizer.span == "none" else TILE
    if any(size % multiple for size in shape):
        return f"{quantizer} weights of shape {shape}: native products need multiples of {multiple}"
    return ""


def kind_of(quantizer: Quantizer) -> str:
    """Kind of the operands of weights in this format."""
    return {"none": "native_block", "row": "native_row", "tensor": "native_tensor"}[quantizer.span]


def native_operand(x_MK: Tensor, quantizer: Quantizer) -> Operand:
    """Activations or gradients BF16 [M, K], quantized along K."""
    if quantizer.span == "none":
        return block_operands(x_MK, quantizer, columns=False)[0]
    codes, scales = _compiled()(x_MK.detach(), quantizer.name)
    return _spanned(codes, scales, quantizer)


def native_operands(x_MK: Tensor, quantizer: Quantizer) -> tuple[Operand, Operand]:
    """The same along K and, transposed, along M: [M, K] and [K, M]. One pass over blocks."""
    if quantizer.span == "none":
        rowwise, columns = block_operands(x_MK, quantizer, columns=True)
        assert columns is not None
        return rowwise, columns
    rowwise = native_operand(x_MK, quantizer)
    if quantizer.span == "tensor":
        return rowwise, transposed(rowwise)
    codes, scales = _compiled()(x_MK.detach().mT.contiguous(), quantizer.name)
    return rowwise, _spanned(codes, scales, quantizer)


def native_operand_of(q: QuantTensor) -> Operand:
    """Published codes [N, K], contraction along K."""
    if q.quantizer.span == "none":
        values = q.codes.view(_CODES[q.quantizer.fmt.name])
        return Operand(values, "native_block", None, q.scales.contiguous())
    return _spanned(q.codes, q.scales, q.quantizer)


def _spanned(codes: Tensor, scales: Tensor, quantizer: Quantizer) -> Operand:
    kind = kind_of(quantizer)
    return Operand(codes.view(_CODES[quantizer.fmt.name]), kind, scales.flatten() if kind == "native_row" else scales)


def block_operands(x_MK: Tensor, quantizer: Quantizer, *, columns: bool) -> tuple[Operand, Operand | None]:
    """1 x 128 blocks along K and, where `columns`, also along M of the transpose, by one kernel.

    M must be a multiple of 128 for the latter. Raises CapabilityError otherwise, or for other blocks.
    """
    if quantizer.block != (1, BLOCK) or (columns and x_MK.shape[0] % BLOCK):
        raise CapabilityError(f"native blocks: {quantizer} over {tuple(x_MK.shape)}; 1 x {BLOCK} in whole blocks only")
    from onegrid.ops import native_triton

    parts = native_triton.quantize_blocks(x_MK.detach(), pow2=quantizer.pow2, columns=columns)
    found = [Operand(values, "native_block", None, scales.mT) for values, scales in parts]
    return found[0], found[1] if columns else None


def transposed(o: Operand) -> Operand:
    """The same numbers with rows and columns exchanged, for weights in tiles and for one scale per tensor."""
    values = o.values.view(torch.uint8).mT.contiguous().view(o.values.dtype)
    if o.kind == "native_tensor":
        return Operand(values, o.kind, o.row)
    if o.kind != "native_block" or o.block is None or not _tiled(o):
        raise CapabilityError(f"{o.kind} operands have no transpose: their scales lie along K")
    return Operand(values, o.kind, None, o.block.mT.contiguous())


def native_matmul(
    a: Operand, b: Operand, *, out_dtype: torch.dtype = torch.bfloat16, bias_N: Tensor | None = None
) -> Tensor:
    """`a` [M, K] times `b` [N, K] transposed: [M, N]. A bias is added in FP32 to the rounded sum."""
    num_rows = a.values.shape[0]
    values, scale_a = _whole_rows(a)
    scale_b = b.row
    if a.kind == "native_block":
        assert b.block is not None
        scale_b = b.block.mT
    elif a.kind == "native_row":
        assert scale_a is not None and scale_b is not None
        scale_a, scale_b = scale_a[:, None], scale_b[None, :]
    assert scale_a is not None and scale_b is not None
    out = torch._scaled_mm(
        values, b.values.mT, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=False
    )[:num_rows]
    return out if bias_N is None else (out.float() + bias_N.float()).to(out_dtype)


def joined_rows(parts: list[Tensor]) -> Tensor:
    """Operand values one after another; float8 goes as bytes."""
    dtype = parts[0].dtype
    if dtype not in _CODES.values():
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)


def decoded_values(o: Operand) -> Tensor:
    """BF16 [M, K]: the numbers of an operand, rounded once."""
    values = o.values.float()
    if o.kind == "native_row":
        assert o.row is not None
        return (values * o.row[:, None]).to(torch.bfloat16)
    if o.kind == "native_tensor":
        assert o.row is not None
        return (values * o.row).to(torch.bfloat16)
    assert o.block is not None
    scale = o.block.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    if _tiled(o):
        scale = scale.repeat_interleave(BLOCK, dim=0)[: values.shape[0]]
    return (values * scale).to(torch.bfloat16)


def _tiled(o: Operand) -> bool:
    assert o.block is not None
    return o.block.shape[0] != o.values.shape[0]


def _whole_rows(a: Operand) -> tuple[Tensor, Tensor | None]:
    """Codes and scales with rows filled up to a multiple of TILE."""
    num_rows = a.values.shape[0]
    missing = max(TILE, round_up(num_rows, TILE)) - num_rows
    scale = a.block if a.kind == "native_block" else a.row
    if not missing:
        return a.values, scale
    pad = torch.nn.functional.pad
    values = pad(a.values.view(torch.uint8), (0, 0, 0, missing)).view(a.values.dtype)
    if scale is not None and a.kind == "native_block":
        scale = pad(scale.mT, (0, missing), value=1.0).mT
    elif scale is not None and a.kind == "native_row":
        scale = pad(scale, (0, missing), value=1.0)
    return values, scale


@lru_cache
def _compiled() -> Any:
    return torch.compile(_quantize, dynamic=True)


def _quantize(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    q = quantize(x, QUANTIZERS[name])
    return q.codes, q.scales
