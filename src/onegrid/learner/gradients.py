"""The size of a step's gradients by layer, and their clipping, with one wait for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError


def squares_by_group(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum of squares, in float64, of the gradients of every layer ("layers.3") and of what lies outside them.

    tensors  by storage key; one without a gradient does not count
    Raises NonFiniteError naming the first tensor with NaN or Inf in its gradient.
    """
    grads = {key: tensor.grad for key, tensor in tensors.items() if tensor.grad is not None}
    if not grads:
        return {}
    squares = torch.stack([grad.double().square().sum() for grad in grads.values()]).tolist()
    out: dict[str, float] = {}
    for (key, grad), square in zip(grads.items(), squares, strict=True):
        if not square < float("inf"):
            bad = int((~torch.isfinite(grad)).sum())
            raise NonFiniteError(f"gradient of {key}: {bad} of {grad.numel()} values are NaN or Inf")
        group = _group(key)
        out[group] = out.get(group, 0.0) + square
    return out


def scale_gradients(tensors: Mapping[str, Tensor], factor: float) -> None:
    """Every gradient times `factor`, in place."""
    for tensor in tensors.values():
        if tensor.grad is not None:
            tensor.grad.mul_(factor)


def _group(key: str) -> str:
    """ "model.layers.3.mlp..." -> "layers.3"; the rest by what it is."""
    pieces = key.split(".")
    return ".".join(pieces[1:3]) if pieces[1] == "layers" else pieces[-2]
