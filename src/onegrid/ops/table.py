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

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError
from onegrid.formats import Quantizer
from onegrid.ops import chains, producers
from onegrid.ops.activation import swiglu
from onegrid.ops.draw import draw, triton_draw
from onegrid.ops.grouped import Dispatch, bring_back, dispatch, triton_bring_back, triton_dispatch
from onegrid.ops.implementations import TABLE, Implementation
from onegrid.ops.norm import rms_norm
from onegrid.ops.note import Next, note, triton_note
from onegrid.ops.operand import Operand
from onegrid.ops.packed_attention import Segments, packed_attention, triton_packed_attention, triton_slots
from onegrid.ops.routing import route, triton_route

__all__ = ["CHOICES", "PLAIN", "TABLE", "TRITON", "Implementation", "Kernels", "kernels_for"]
CHOICES = ("auto", "plain", "triton")


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
    route: Callable[..., tuple[Tensor, Tensor, Tensor]]
    dispatch: Callable[..., Dispatch]
    bring_back: Callable[[Tensor, Dispatch, Tensor, Tensor | None], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """On a GPU; a CPU draws from one running sum, `sampler.draw`."""
    note: Callable[..., Next]
    """What a captured step does with what was drawn."""
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
    route=route,
    dispatch=dispatch,
    bring_back=bring_back,
    draw=draw,
    note=note,
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
    route=triton_route,
    dispatch=triton_dispatch,
    bring_back=triton_bring_back,
    draw=triton_draw,
    note=triton_note,
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
