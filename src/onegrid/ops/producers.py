"""What makes the activations of a linear, with the linear's quantizer applied on the way out.

The functions without prefix are the definitions: the chain, then `operand`. Those named `triton_` are kernels with the
definitions' bytes and no gradient: the side that makes tokens calls them.
"""

from __future__ import annotations

from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.ops import chains
from onegrid.ops.activation import swiglu
from onegrid.ops.arranged import MOST_ROWS
from onegrid.ops.operand import Operand, operand


def residual_norm(
    x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float, quantizer: Quantizer
) -> tuple[Tensor, Operand]:
    """x + y rounded to BF16, and the operand of its RMSNorm."""
    total, h = chains.residual_norm(x_ND, y_ND, weight_D, eps)
    return total, operand(h, quantizer)


def gated(gate_NF: Tensor, up_NF: Tensor, quantizer: Quantizer) -> Operand:
    """The operand of silu(gate) * up."""
    return operand(swiglu(gate_NF, up_NF), quantizer)


def fuses(quantizer: Quantizer, width: int) -> bool:
    """Whether the `triton_` functions cover rows of this width."""
    from onegrid.ops import quantize_triton

    return quantize_triton.covers(quantizer) and width % (quantizer.block[1] or 1) == 0 and width <= 16_384


def triton_residual_norm(
    x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float, quantizer: Quantizer
) -> tuple[Tensor, Operand]:
    """`residual_norm` on NVIDIA GPUs, with the sums of `chains.triton_residual_norm`."""
    from onegrid.ops import quantize_triton

    total, values, amax, arranged = quantize_triton.residual_norm(x_ND, y_ND, weight_D, eps, quantizer)
    return total, Operand(values, quantizer.matmul, amax, arranged=arranged)


def triton_gated(gate_NF: Tensor, up_NF: Tensor, quantizer: Quantizer) -> Operand:
    """`gated` on NVIDIA GPUs; two kernels for few rows, whose numbers would be too few threads' work in one."""
    from onegrid.ops import fused_triton, quantize_triton

    if len(gate_NF) <= MOST_ROWS:
        return operand(fused_triton.swiglu(gate_NF, up_NF), quantizer)
    values, amax = quantize_triton.swiglu(gate_NF, up_NF, quantizer)
    return Operand(values, quantizer.matmul, amax)
