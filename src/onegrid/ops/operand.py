"""What a matmul reads: element values that are exact in the compute dtype, and the factors that are applied afterwards.

Folding a global factor into the values before rounding would lose bits (numerics.md section 9.2), so it stays outside
and meets the sum in the epilogue of `linear.matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.formats import Quantizer, QuantTensor, decode, elements, quantize, quantize_decode
from onegrid.formats.short import short_values
from onegrid.ops import quantize_cuda
from onegrid.ops.quantize_compiled import compiled_decode, has_triton, worth_compiling


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a matmul, contraction on the last axis.

    values   [..., M, K] in the compute dtype (FP32 on a CPU, BF16 on CUDA), exact
    kind     "decoded": values are the numbers themselves
             "nvfp4":   values are code x block scale; `row` holds the global amax
             "scaled":  values are codes; `row` holds the decode multiplier
             "block":   values are codes; `block` holds a multiplier per 128 of K
             "native_tensor", "native_row", "native_block": see `ops.native`, values are float8
    row      FP32 [..., M] or None
    block    FP32 [..., M, ceil(K / 128)] or None
    arranged the same values in the order of `ops.arranged`, where the kernel that made them wrote both, else None
    """

    values: Tensor
    kind: str = "decoded"
    row: Tensor | None = None
    block: Tensor | None = None
    arranged: Tensor | None = None

    def part(self, index: int | slice | Tensor) -> Operand:
        """The operand at `index` of the first axis: an expert of a stack, or rows."""
        row = None if self.row is None else self.row[index]
        block = None if self.block is None else self.block[index]
        return Operand(self.values[index], self.kind, row, block)


def compute_dtype(device: torch.device) -> torch.dtype:
    """FP32 where BF16 products are slow or missing (CPU), BF16 on CUDA. Decoded values are exact in both."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def operand(x: Tensor, quantizer: Quantizer | None, *, axis: int = -1, amax: Tensor | None = None) -> Operand:
    """Quantizes `x` [..., M, K] along `axis` and makes it ready for a matmul over that axis.

    x       BF16 or FP32. None as quantizer keeps the values (rounded to BF16 if they are FP32).
    axis    -1: rows stay rows. -2: the result is transposed, [..., K, M], contraction over M.
    NaN and Inf follow the format's definition; the caller checks counts on the paths that publish weights.
    """
    dtype = compute_dtype(x.device)
    if quantizer is None:
        values = x.to(torch.bfloat16).to(dtype)
        return Operand(values if axis == -1 else values.mT)
    if amax is None and (short := short_values(x, quantizer, axis)) is not None:
        return Operand(short.to(dtype) if axis == -1 else short.to(dtype).mT)
    if quantizer.matmul in ("decoded", "nvfp4"):
        arranged = None
        if x.is_cuda and amax is None:
            values, found, arranged = _decoded_on_gpu(x.detach(), quantizer, axis)
        else:
            values, found = _decoded(x, quantizer, axis, amax)
        row = None if quantizer.matmul == "decoded" else _per_row(found, x.shape, axis)
        return Operand(values if axis == -1 else values.mT, quantizer.matmul, row, arranged=arranged)
    return operand_of(quantize(x, quantizer, axis=axis, amax=amax))


def _decoded(x: Tensor, quantizer: Quantizer, axis: int, amax: Tensor | None) -> tuple[Tensor, Tensor | None]:
    q = quantize_decode(x, quantizer, axis=axis, amax=amax, stats=False)
    return q.values.to(compute_dtype(x.device)), q.amax


def _decoded_on_gpu(x: Tensor, quantizer: Quantizer, axis: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same bytes from the fastest kernel that covers the case, see the table; and `arranged` where it makes it."""
    if axis == -1 and quantize_cuda.covers(x, quantizer):
        return quantize_cuda.quantize_decode(x, quantizer)
    if axis == -2 and has_triton():
        from onegrid.ops import quantize_triton

        if quantize_triton.covers_columns(x, quantizer):
            return quantize_triton.columns(x, quantizer), None, None
    if worth_compiling(x, quantizer, axis):
        return *compiled_decode(x, quantizer, axis), None
    return *_decoded(x, quantizer, axis, None), None


def operand_of(q: QuantTensor) -> Operand:
    """The operand that published codes and scales stand for: the same bytes as `operand` of the numbers behind them."""
    quantizer, axis, kind = q.quantizer, q.axis, q.quantizer.matmul
    values, row = _values_of(q), row_of(q)
    if kind != "block_fp32":
        return Operand(values if axis == -1 else values.mT, kind, row)
    num_rows = values.shape[-2 if axis == -1 else -1]
    scales = q.scales if axis == -1 else q.scales.mT
    block = scales.repeat_interleave(quantizer.block[0] or 1, dim=-2)[..., :num_rows, :].contiguous()
    return Operand(values if axis == -1 else values.mT, "block", None, block)


def row_of(q: QuantTensor) -> Tensor | None:
    """FP32 [..., M]: `row` of `operand_of(q)`, without the values; None where the kind has none. May be a broadcast."""
    if q.quantizer.matmul == "nvfp4":
        return _per_row(q.amax, q.shape, q.axis)
    if q.quantizer.matmul == "scaled":
        factor = q.scales.squeeze(q.axis) if q.scales.dim() == len(q.shape) else q.scales
        return _per_row(factor, q.shape, q.axis)
    return None


def _values_of(q: QuantTensor) -> Tensor:
    """What a matmul multiplies, in the logical shape and the compute dtype, by the kernel where it covers the case."""
    if q.codes.is_cuda and has_triton():
        from onegrid.ops import decode_triton

        if decode_triton.covers(q):
            return decode_triton.values(q)
    inside = q.quantizer.matmul in ("decoded", "nvfp4")
    return (decode(q) if inside else elements(q)).to(compute_dtype(q.codes.device))


def _per_row(factor: Tensor | None, shape: Sequence[int], axis: int) -> Tensor:
    """A factor per tensor, per stacked tensor or per row, widened to one per row of the operand of `shape`."""
    assert factor is not None
    num_rows = shape[-2 if axis == -1 else -1]
    if factor.dim() == len(shape) - 1 and factor.shape[-1] == num_rows and factor.shape[:-1] == tuple(shape[:-2]):
        return factor
    return factor.reshape(*shape[:-2], 1).expand(*shape[:-2], num_rows)


def dequantized(o: Operand) -> Tensor:
    """The numbers an operand stands for, [..., M, K] in the compute dtype, rounded once to BF16 where a factor applies.

    These are the very codes of the forward pass with their factors folded in, for a backward pass in BF16.
    """
    if o.kind == "decoded":
        return o.values
    if o.kind.startswith("native_"):
        from onegrid.ops.native import decoded_values

        return decoded_values(o)
    values = o.values
    if o.row is not None:
        # `full`, since `tensor` would copy from the host, which no graph can
        factor = torch.full((), 1.0 / 2688.0, dtype=torch.float32, device=o.row.device)
        row = o.row * factor if o.kind == "nvfp4" else o.row
        values = values.float() * row.unsqueeze(-1)
    if o.block is not None:
        scale = o.block.repeat_interleave(128, dim=-1)[..., : values.shape[-1]]
        values = values.float() * scale
    return values.to(torch.bfloat16).to(o.values.dtype)
