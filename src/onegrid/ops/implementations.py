"""Every implementation of every operation, with what it promises, where, and for which shapes: rows of `ops.table`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One row of the table."""

    operation: str
    name: str
    promise: Literal["definition", "bits", "rows", "bound"]
    devices: str
    shapes: str
    where: str
    """Module and function below `onegrid.ops`, or of another part with its name before them."""


TABLE = (
    Implementation(
        operation="norm", name="plain", promise="definition", devices="all", shapes="all", where="norm.rms_norm"
    ),
    Implementation(
        operation="norm",
        name="triton",
        promise="rows",
        devices="CUDA",
        shapes="width up to 65,536",
        where="chains.triton_norm",
    ),
    Implementation(
        operation="residual and norm",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="chains.residual_norm",
    ),
    Implementation(
        operation="residual and norm",
        name="triton",
        promise="rows",
        devices="CUDA",
        shapes="width up to 65,536",
        where="chains.triton_residual_norm",
    ),
    Implementation(
        operation="head norm and rotation",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="chains.heads",
    ),
    Implementation(
        operation="head norm and rotation",
        name="triton",
        promise="rows",
        devices="CUDA",
        shapes="head width 16, 32, 64, 128, 256",
        where="chains.triton_heads",
    ),
    Implementation(
        operation="swiglu", name="plain", promise="definition", devices="all", shapes="all", where="activation.swiglu"
    ),
    Implementation(
        operation="swiglu", name="triton", promise="bits", devices="CUDA", shapes="all", where="chains.triton_swiglu"
    ),
    Implementation(
        operation="residual, norm and quantize",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="producers.residual_norm",
    ),
    Implementation(
        operation="residual, norm and quantize",
        name="triton",
        promise="rows",
        devices="CUDA; the bytes of the norm's own row and the quantizer's",
        shapes="width up to 16,384; MX, NVFP4 per row, FP8 1 x 128 with power-of-two scales; no gradient",
        where="producers.triton_residual_norm",
    ),
    Implementation(
        operation="swiglu and quantize",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="producers.gated",
    ),
    Implementation(
        operation="swiglu and quantize",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="width up to 16,384; MX, NVFP4 per row, FP8 1 x 128 by powers of 2; no gradient; two kernels to 64 rows",
        where="producers.triton_gated",
    ),
    Implementation(
        operation="packed attention",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="packed_attention.packed_attention",
    ),
    Implementation(
        operation="packed attention",
        name="triton",
        promise="rows",
        devices="CUDA, compute capability 8.0 and up",
        shapes="head width 16, 32, 64, 128, 256",
        where="packed_attention.triton_packed_attention",
    ),
    Implementation(
        operation="decode attention",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="attention.attention",
    ),
    Implementation(
        operation="decode attention",
        name="triton",
        promise="rows",
        devices="CUDA, compute capability 8.0 and up",
        shapes="head width 16, 32, 64, 128, 256",
        where="packed_attention.triton_slots",
    ),
    Implementation(
        operation="quantize and decode",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="operand.operand",
    ),
    Implementation(
        operation="quantize and decode",
        name="short",
        promise="bits",
        devices="CPU",
        shapes="two axes, whole blocks of an MX format, block maxima within 2^-100 .. 2^100",
        where="operand.short_values",
    ),
    Implementation(
        operation="quantize and decode",
        name="cuda",
        promise="bits",
        devices="CUDA, compute capability 9.0",
        shapes="BF16, two axes, along rows, whole blocks; MX, NVFP4 per row, FP8 1 x 128 with power-of-two scales",
        where="quantize_cuda.quantize_decode",
    ),
    Implementation(
        operation="quantize and decode",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="two axes, along columns, whole blocks; MX, FP8 1 x 128 with power-of-two scales",
        where="quantize_triton.columns",
    ),
    Implementation(
        operation="quantize and decode",
        name="compiled",
        promise="bits",
        devices="CUDA",
        shapes="two axes, at least 512 wide, whole blocks",
        where="quantize_compiled.compiled_decode",
    ),
    Implementation(
        operation="quantize",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="formats.quantize.quantize",
    ),
    Implementation(
        operation="quantize",
        name="cuda",
        promise="bits",
        devices="CUDA, compute capability 9.0",
        shapes="finite BF16, along rows, whole blocks; MX, NVFP4 per tensor, FP8 128 x 128 with power-of-two scales",
        where="codes_cuda.codes_of",
    ),
    Implementation(
        operation="decode", name="plain", promise="definition", devices="all", shapes="all", where="operand.operand_of"
    ),
    Implementation(
        operation="decode",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="contraction last, whole blocks",
        where="decode_triton.values",
    ),
    Implementation(
        operation="draw", name="plain", promise="definition", devices="all", shapes="all", where="draw.draw"
    ),
    Implementation(
        operation="draw",
        name="triton",
        promise="bound",
        devices="CUDA; another token only within 1e-13 of a boundary, only the sampler draws",
        shapes="all",
        where="draw.triton_draw",
    ),
    Implementation(
        operation="route", name="plain", promise="definition", devices="all", shapes="all", where="routing.route"
    ),
    Implementation(
        operation="route",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="no gradient, nothing forced; the product and the softmax are the library's",
        where="routing.triton_route",
    ),
    Implementation(
        operation="dispatch", name="plain", promise="definition", devices="all", shapes="all", where="grouped.dispatch"
    ),
    Implementation(
        operation="dispatch",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="up to 4,096 pairs of a token and an expert",
        where="grouped.triton_dispatch",
    ),
    Implementation(
        operation="bring back",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="grouped.bring_back",
    ),
    Implementation(
        operation="bring back",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="no gradient",
        where="grouped.triton_bring_back",
    ),
    Implementation(
        operation="take rows", name="plain", promise="definition", devices="all", shapes="all", where="grouped.rows_of"
    ),
    Implementation(
        operation="take rows",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="no gradient",
        where="experts_triton.take",
    ),
    Implementation(
        operation="note", name="plain", promise="definition", devices="all", shapes="all", where="note.note"
    ),
    Implementation(
        operation="note", name="triton", promise="bits", devices="CUDA", shapes="all", where="note.triton_note"
    ),
    Implementation(
        operation="matmul",
        name="native",
        promise="rows",
        devices="CUDA, compute capability 9.0, where recipe.matmul asks for it; sums of 13 bits a block of 128",
        shapes="FP8 by row (multiples of 16) or block (multiples of 512); by tensor too, which promises no rows",
        where="native.native_matmul",
    ),
    Implementation(
        operation="grouped matmul",
        name="plain",
        promise="definition",
        devices="all; waits for the host on a GPU",
        shapes="all",
        where="grouped.by_expert",
    ),
    Implementation(
        operation="grouped matmul",
        name="library",
        promise="bits",
        devices="CUDA, compute capability 9.0",
        shapes="decoded operands, widths that are multiples of 8",
        where="grouped_cuda.library_grouped",
    ),
    Implementation(
        operation="grouped matmul",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="all",
        where="grouped_cuda.triton_grouped",
    ),
    Implementation(
        operation="grouped wgrad",
        name="plain",
        promise="definition",
        devices="all; waits for the host on a GPU",
        shapes="all",
        where="grouped.wgrad_by_expert",
    ),
    Implementation(
        operation="grouped wgrad",
        name="triton",
        promise="bound",
        devices="CUDA; the same bytes every time",
        shapes="all",
        where="grouped_cuda.grouped_wgrad",
    ),
    Implementation(
        operation="matmul", name="plain", promise="definition", devices="all", shapes="all", where="linear.matmul"
    ),
    Implementation(
        operation="matmul",
        name="packed",
        promise="bits",
        devices="CUDA, compute capability 9.0",
        shapes="16 to 64 rows; MXFP8, MXFP4, NVFP4; N a multiple of 16, K of 512; where faster",
        where="packed_cuda.packed_matmul",
    ),
    Implementation(
        operation="matmul",
        name="few",
        promise="bits",
        devices="CUDA, compute capability 9.0",
        shapes="16 to 64 rows; BF16; N a multiple of 8, K of 128; where faster",
        where="few_cuda.few_matmul",
    ),
    Implementation(
        operation="digest",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="formats.digest.weighted_sum",
    ),
    Implementation(
        operation="digest",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="64 chunks of 16 KiB and more",
        where="formats.digest_triton.triton_weighted_sum",
    ),
    Implementation(
        operation="quantize to codes",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="formats.quantize.quantize",
    ),
    Implementation(
        operation="quantize to codes",
        name="short",
        promise="bits",
        devices="CPU",
        shapes="BF16, two axes, whole blocks of MXFP8 along rows, block maxima within 2^-100 .. 2^100",
        where="formats.short_codes.short_codes",
    ),
    Implementation(
        operation="quantize to codes",
        name="triton",
        promise="bits",
        devices="CUDA, where recipe.matmul asks for native products",
        shapes="BF16, two axes, FP8 1 x 128, along rows, and along columns where they are whole blocks",
        where="native.block_operands",
    ),
    Implementation(
        operation="quantize to codes",
        name="compiled",
        promise="bits",
        devices="CUDA, where recipe.matmul asks for native products",
        shapes="two axes, FP8 by row or by tensor",
        where="native.native_operand",
    ),
    Implementation(
        operation="packed attention, backward",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="attention.Attention",
    ),
    Implementation(
        operation="packed attention, backward",
        name="triton",
        promise="bound",
        devices="CUDA, compute capability 8.0 and up; the same bytes every time",
        shapes="head width 16, 32, 64, 128, 256",
        where="packed_attention.TritonPackedAttention",
    ),
)
