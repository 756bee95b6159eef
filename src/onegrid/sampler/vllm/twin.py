"""A second copy of one of the engine's layers, filled from canonical bytes and processed by the engine's own code.

What it holds afterwards is what the live layer must hold, whatever layout a kernel wants: swizzled scales, packed
experts, Marlin tiles. It starts as 0xFF bytes, so a tensor that a loader skips shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onegrid.sampler.vllm.places import Place

SCRATCH = ("workspace",)
"""Attributes that kernels write while they run."""


def twin_of(layer: nn.Module) -> nn.Module:
    """An unfilled layer of the same kind, with the parameters that its loaders fill, on the same device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    info = get_layerwise_info(layer)
    twin = copy.copy(layer)
    done = ("_already_called_process_weights_after_loading", "cpu_linear")
    twin.__dict__ = {key: value for key, value in layer.__dict__.items() if key not in done}
    twin._parameters, twin._buffers = {}, {}
    twin._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
    with info.restore_device:
        for register, metas in zip((twin.register_parameter, twin.register_buffer), info.restore_metadata, strict=True):
            for name, meta in metas.items():
                tensor = materialize_meta_tensor(meta)
                poison(tensor)
                _rebind(tensor, layer, twin)
                register(name, tensor)  # type: ignore[operator]
    for name, parameter in layer._parameters.items():  # such as bias, which no metadata is kept of
        twin._parameters.setdefault(name, parameter)
    for name, buffer in layer._buffers.items():
        twin._buffers.setdefault(name, buffer)
    method: Any = copy.copy(layer.quant_method)
    if hasattr(method, "moe_kernel"):
        method.moe_kernel = method.moe_quant_config = None
    twin.quant_method = method
    if hasattr(layer, "scheme"):
        twin.scheme = copy.copy(layer.scheme)
    return twin


def fill(twin: nn.Module, place: Place, parts: Mapping[str, Tensor]) -> None:
    """One canonical tensor, as suffix -> tensor of a checkpoint, by the loaders of the parameters themselves."""
    for suffix, tensor in parts.items():
        if place.expert is None:
            parameter = twin._parameters[suffix]
            assert parameter is not None
            arguments = (parameter, tensor) if place.shard is None else (parameter, tensor, place.shard)
            _loader(parameter)(*arguments)
        else:
            stem = "w2" if place.shard == "w2" else "w13"
            parameter = twin._parameters[f"{stem}_{suffix}"]
            assert parameter is not None
            name = f"{place.module}.{stem}_{suffix}"
            _loader(parameter)(parameter, tensor, name, shard_id=place.shard, expert_id=place.expert)


def process(twin: nn.Module) -> None:
    """What the engine does with a layer's weights when all are there."""
    method: Any = twin.quant_method
    method.process_weights_after_loading(twin)


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Everything that a layer and its kernels hold, by path: parameters, buffers, and what was derived from them."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
        if tensor is not None:
            found[name] = tensor
            seen.add(id(tensor))
    _collect({k: v for k, v in layer.__dict__.items() if not k.startswith("_")}, "", found, seen, depth=4)
    return {name: x.detach() for name, x in found.items() if name.rpartition(".")[2] not in SCRATCH}


def poison(tensor: Tensor) -> None:
    """0xFF in every byte: NaN in most formats, and never a weight by accident."""
    if tensor.numel():
        flat = torch.as_strided(tensor.detach(), (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        flat.view(torch.uint8).fill_(0xFF)


def _collect(thing: Any, path: str, found: dict[str, Tensor], seen: set[int], *, depth: int) -> None:
    if id(thing) in seen or depth < 0 or isinstance(thing, nn.Module | type | MethodType):
        return
    if isinstance(thing, Tensor):
        seen.add(id(thing))
        found[path] = thing
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(thing, dict):
        items = thing.items()
    elif isinstance(thing, list | tuple):
        items = enumerate(thing)
    elif type(thing).__module__.startswith("vllm.model_executor.") and hasattr(thing, "__dict__"):
        items = vars(thing).items()
    else:
        return
    seen.add(id(thing))
    for key, value in list(items):
        _collect(value, f"{path}.{key}" if path else str(key), found, seen, depth=depth - 1)


def _loader(parameter: Tensor) -> Any:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return _unwrapped(getattr(parameter, "weight_loader", default_weight_loader))


def _unwrapped(loader: Any) -> Any:
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _rebind(tensor: Tensor, layer: nn.Module, twin: nn.Module) -> None:
    """Loaders that are methods of the layer become those of its twin."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    for key, value in tensor.__dict__.items():
        value = _unwrapped(value)
        if isinstance(value, MethodType) and (value.__self__ is layer or value.__self__ is layer_ref_sentinel):
            value = MethodType(value.__func__, twin)
        tensor.__dict__[key] = value
