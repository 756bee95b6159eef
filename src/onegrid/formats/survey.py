"""What every format costs and how far it is from a given tensor: the rows of `onegrid formats`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onegrid.formats.decode import dequantize
from onegrid.formats.quantize import quantize
from onegrid.formats.table import QUANTIZERS, Quantizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One quantizer on one tensor."""

    name: str
    element: str
    block: str
    """"1 x 32", "row", "tensor"."""
    scale: str
    """How block scales are stored, and what a global amax covers."""
    bits_per_element: float
    """Codes, scales and amax of this tensor, divided by its elements."""
    smallest: float
    """Smallest positive element value before scaling."""
    largest: float
    """Largest element value before scaling."""
    relative_error: float
    """Root of sum((q - x)^2) / sum(x^2), in FP64; 0 for a zero tensor, NaN if the input or result is not finite."""
    nonfinite: int
    saturated: int
    source: str


def format_errors(x_MK: Tensor, quantizers: dict[str, Quantizer] | None = None) -> list[Row]:
    """A row for every quantizer (default: all), on a tensor [..., M, K] of FP32, BF16 or FP16 quantized along K."""
    return [_row(x_MK, quantizer) for quantizer in (QUANTIZERS if quantizers is None else quantizers).values()]


def _row(x_MK: Tensor, quantizer: Quantizer) -> Row:
    q = quantize(x_MK, quantizer)
    x = x_MK.double()
    power = x.square().sum().item()
    error = (dequantize(q).double() - x).square().sum().item()
    span = "" if quantizer.span == "none" or not quantizer.has_amax else f" + fp32 per {quantizer.span}"
    return Row(
        name=quantizer.name,
        element=quantizer.fmt.name,
        block=_block(quantizer),
        scale=quantizer.scale + (" (power of two)" if quantizer.pow2 else "") + span,
        bits_per_element=8 * q.num_bytes / max(x.numel(), 1),
        smallest=quantizer.fmt.step,
        largest=quantizer.fmt.max,
        relative_error=(error / power) ** 0.5 if power else 0.0,
        nonfinite=int(q.stats.nonfinite),
        saturated=int(q.stats.saturated),
        source=quantizer.source,
    )


def _block(quantizer: Quantizer) -> str:
    across, along = quantizer.block
    if along is None:
        return "tensor" if across is None else "row"
    return f"{across} x {along}"
