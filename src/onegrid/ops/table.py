"""Every implementation of every operation that both sides call, with what it promises, where, and for which shapes.

The definition is plain PyTorch. Another implementation has the same signature and one of three promises:

    bits   the bytes of the definition, on one kind of device
    rows   a row's bytes do not depend on the other rows, but they are not the definition's: both sides must use it
    bound  within a derived bound of exact results, nothing more

`kernels_for` picks once, at start-up, by device and by the shapes of a model; what it picked is a value that both
sides are given, and its names go into the record of a run. Nothing is chosen inside an operation.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError
from onegrid.formats import Quantizer
from onegrid.ops import chains, producers
from onegrid.ops.activation import swiglu
from onegrid.ops.draw import draw, triton_draw
from onegrid.ops.norm import rms_norm
from onegrid.ops.operand import Operand
from onegrid.ops.packed_attention import Segments, packed_attention, triton_packed_attention, triton_slots

CHOICES = ("auto", "plain", "triton")


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
        operation="swiglu",
        name="triton",
        promise="bits",
        devices="CUDA",
        shapes="all",
        where="chains.triton_swiglu",
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
        shapes="width up to 16,384; MX, NVFP4 per row, FP8 1 x 128 with power-of-two scales; no gradient",
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
        devices="CUDA; another token only within 1e-13 of a boundary, and only the sampler draws",
        shapes="all",
        where="draw.triton_draw",
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
        operation="matmul",
        name="plain",
        promise="definition",
        devices="all",
        shapes="all",
        where="linear.matmul",
    ),
    Implementation(
        operation="matmul",
        name="packed",
        promise="bits",
        devices="CUDA, compute capability 9.0",
        shapes="16 to 64 rows; MXFP8, MXFP4, NVFP4; N a multiple of 16, K of 256; where faster, or no other is kept",
        where="packed_cuda.packed_matmul",
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
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The implementations that one policy runs on, learner and sampler alike."""

    name: str
    norm: Callable[[Tensor, Tensor, float], Tensor]
    residual_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    heads: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    residual_norm_operand: Callable[[Tensor, Tensor, Tensor, float, Quantizer], tuple[Tensor, Operand]]
    swiglu_operand: Callable[[Tensor, Tensor, Quantizer], Operand]
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """On a GPU; a CPU draws from one running sum, `sampler.draw`."""
    packed_attention: Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
    slots: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(q, k, v, keys, values, position): one new token a slot, written to the cache and attended from; None where
    the definition does, which must know the longest sequence."""
    why: str = ""
    """Why "auto" did not take a faster one."""

    @property
    def can_capture(self) -> bool:
        """Whether a decode step of these never waits for the device."""
        return self.name == "triton"


PLAIN = Kernels(
    name="plain",
    norm=rms_norm,
    residual_norm=chains.residual_norm,
    heads=chains.heads,
    swiglu=swiglu,
    residual_norm_operand=producers.residual_norm,
    swiglu_operand=producers.gated,
    draw=draw,
    packed_attention=packed_attention,
)

TRITON = Kernels(
    name="triton",
    norm=chains.triton_norm,
    residual_norm=chains.triton_residual_norm,
    heads=chains.triton_heads,
    swiglu=chains.triton_swiglu,
    residual_norm_operand=producers.triton_residual_norm,
    swiglu_operand=producers.triton_gated,
    draw=triton_draw,
    packed_attention=triton_packed_attention,
    slots=triton_slots,
)


def kernels_for(
    device: torch.device | str, *, num_heads: int, num_groups: int, head_dim: int, choice: str = "auto"
) -> Kernels:
    """The kernels of a model with these heads on `device`.

    choice  "plain", "triton", or "auto": Triton where it covers device and shapes, else plain, with one warning on a
            GPU that says why
    Raises ConfigError for another choice, CapabilityError where "triton" is asked for and does not cover.
    """
    if choice not in CHOICES:
        raise ConfigError(f"kernels is {choice!r}; allowed are {', '.join(CHOICES)}")
    device = torch.device(device)
    if choice == "plain" or (choice == "auto" and device.type != "cuda"):
        return PLAIN
    missing = _uncovered(device, num_heads, num_groups, head_dim)
    if not missing:
        return TRITON
    if choice == "triton":
        raise CapabilityError(f'kernels = "triton": {missing}; use "plain" or "auto"')
    warnings.warn(f"plain PyTorch instead of Triton kernels, correct but slow: {missing}", stacklevel=2)
    return PLAIN


def _uncovered(device: torch.device, num_heads: int, num_groups: int, head_dim: int) -> str:
    if device.type != "cuda":
        return f"they need an NVIDIA GPU, the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no BF16 matrix unit"
    from onegrid.ops.attention_triton import WIDTHS

    if head_dim not in WIDTHS or num_heads % num_groups:
        return f"{num_heads} heads over {num_groups} of {head_dim}; widths {WIDTHS} are covered"
    return ""
