"""What a checkpoint holds, tensor by tensor: format, grid, size, and its error against a reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onegrid.convert.source import Source, Weight
from onegrid.errors import WeightsError
from onegrid.recipe.kinds import kind_of, num_layers_of


@dataclass(frozen=True, slots=True)
class Content:
    """One canonical tensor of a checkpoint."""

    name: str
    kind: str
    shape: tuple[int, ...]
    fmt: str
    """Quantizer, or the element type of a plain tensor."""
    grid: str
    """Element type and shape of the scales, "-" without."""
    num_bytes: int
    relative_error: float | None
    """Norm of the difference over the norm of the reference, in FP64; None without a reference."""
    max_abs_error: float | None


def contents(
    source: Source, reference: Source | None = None, *, on_tensor: Callable[[str], None] | None = None
) -> list[Content]:
    """Every tensor of a checkpoint, in order.

    reference  a checkpoint of the same tensors, plain or quantized; both are compared in BF16
    Raises WeightsError where the reference lacks a tensor or has it in another shape.
    """
    stored = source.stored_quantizers()
    num_layers = num_layers_of(source.config)
    rows = []
    for name, weight in source.weights.items():
        relative, largest = (None, None) if reference is None else _error(source, reference, name)
        fmt = stored[name] or weight.dtype.lower()
        size = _num_bytes(source, weight)
        rows.append(
            Content(name, kind_of(name, num_layers), weight.shape, fmt, _grid(source, weight), size, relative, largest)
        )
        if on_tensor is not None:
            on_tensor(name)
    return rows


def pattern(name: str) -> str:
    """The name with every number as `#`: tensors with the same pattern are alike but for layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def _grid(source: Source, weight: Weight) -> str:
    if weight.scales is None:
        return "-"
    entry = source.entries[weight.scales.key]
    suffix = weight.scales.key.rpartition(".")[2]
    beside = f", {weight.global_scale.key.rpartition('.')[2]} ({weight.sense})" if weight.global_scale else ""
    return f"{suffix} {entry.dtype} {'x'.join(map(str, entry.shape)) or 'scalar'}{beside}"


def _num_bytes(source: Source, weight: Weight) -> int:
    from onegrid.convert.shard_files import DTYPES, Slot

    total = 0
    for key in weight.keys:
        entry = source.entries[key]
        if entry.dtype in DTYPES:
            num_bytes = Slot(entry.dtype, entry.shape).num_bytes
            total += num_bytes // entry.shape[0] if weight.codes.expert is not None else num_bytes
    return total


def _error(source: Source, reference: Source, name: str) -> tuple[float, float]:
    if name not in reference.weights:
        raise WeightsError(f"the reference {reference.folder} has no {name}")
    x, y = source.values(name).double(), reference.values(name).double()
    if x.shape != y.shape:
        raise WeightsError(f"{name} has {tuple(x.shape)}, in the reference {reference.folder} {tuple(y.shape)}")
    difference = x - y
    norm = torch.linalg.vector_norm(y)
    relative = float(torch.linalg.vector_norm(difference) / norm) if float(norm) else float(difference.abs().sum())
    return relative, float(difference.abs().max()) if difference.numel() else 0.0
