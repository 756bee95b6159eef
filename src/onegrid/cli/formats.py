"""`onegrid formats`: the number formats, and the error of each on a tensor."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from onegrid.errors import WeightsError
from onegrid.formats import format_errors

HEADER = ("quantizer", "element", "block", "scale", "bits", "range of an element", "relative error", "saturated")


def run(tensor: str | None) -> None:
    """Print one row a quantizer.

    tensor  "FILE::NAME", a tensor of a safetensors file with at least two axes; None: a normal random matrix
    Raises WeightsError for a file or name that is not there or a tensor that is no matrix of floating-point numbers.
    """
    x = _example() if tensor is None else _read(tensor)
    what = "a 512 x 512 matrix of normal random numbers" if tensor is None else f"{tensor} {tuple(x.shape)}"
    rows: list[tuple[str, ...]] = [HEADER]
    for row in format_errors(x):
        error = f"{row.relative_error:.3e}" if math.isfinite(row.relative_error) else "not finite"
        span = f"{row.smallest:.3g} .. {row.largest:g}"
        numbers = (f"{row.bits_per_element:.2f}", span, error, str(row.saturated))
        rows.append((row.name, row.element, row.block, row.scale, *numbers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    rows.insert(1, tuple("-" * width for width in widths))
    print(f"number formats, and their error on {what}\n")
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _example() -> Tensor:
    return torch.randn(512, 512, generator=torch.Generator().manual_seed(0))


def _read(tensor: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    file, separator, name = tensor.partition("::")
    if not separator or not name:
        raise WeightsError(f"{tensor!r} is not FILE::NAME, such as model.safetensors::lm_head.weight")
    if not Path(file).exists():
        raise WeightsError(f"there is no file {file}")
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            if name not in names:
                raise WeightsError(f"{file} has no tensor {name!r}; it has {', '.join(names[:8])}, ...")
            x = tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is no safetensors file: {error}") from error
    if x.dim() < 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise WeightsError(f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be a matrix of floats")
    return x
