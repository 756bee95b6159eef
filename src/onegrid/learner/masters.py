"""FP32 masters from canonical tensors, checked: every tensor of the model, of its shape, finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError, WeightsError
from onegrid.formats import count_true
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack


def gather(
    spec: ModelSpec, keys: Mapping[str, tuple[str, ...]], weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """FP32 storage tensors from canonical ones, checked."""
    shapes = tensor_shapes(spec)
    missing, extra = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or extra:
        raise WeightsError(f"weights do not fit the model: missing {missing[:8]}, not of it {extra[:8]}")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise WeightsError(f"{name} has shape {tuple(weights[name].shape)}, the model needs {shape}")
        bad = int(count_true(~torch.isfinite(weights[name])))
        if bad:
            raise NonFiniteError(f"{name}: {bad} of {weights[name].numel()} values are NaN or Inf")
    out = {}
    for key, names in keys.items():
        parts = [weights[name].detach().to(device, torch.float32) for name in names]
        out[key] = torch.stack(parts) if is_stack(key) else parts[0].clone()
    return out
