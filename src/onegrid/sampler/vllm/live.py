"""What every canonical tensor is in a running engine: read from modules, kernels and storage, not from a configuration.

A weight's format follows from the kernel that reads it. What a kernel does with its inputs is known for those in
`INPUTS`; for any other the answer is None, which an audit takes as `could not tell`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onegrid.sampler.vllm.places import Place
from onegrid.sampler.vllm.verify import Inside, is_plain, verify
from onegrid.sampler.vllm.wire import values_of

INPUTS: dict[str, str] = {
    "EmulationMxfp8LinearKernel": "bf16",
    "MarlinMxfp8LinearKernel": "bf16",
    "MarlinNvFp4LinearKernel": "bf16",
    "MarlinFP8ScaledMMLinearKernel": "bf16",
    "MarlinMxFp4LinearKernel": "bf16",
    "MarlinExperts": "bf16",
    "BatchedMarlinExperts": "bf16",
    "CPUFp8BlockScaledMMKernel": "bf16",
    "CPUFp8PerTensorScaledMMLinearKernel": "bf16",
    "FlashInferCutlassMxfp8LinearKernel": "mxfp8",
    "FlashInferCutedslMxfp8LinearKernel": "mxfp8",
    "FlashInferTrtllmMxfp8LinearKernel": "mxfp8",
    "EmulationNvFp4LinearKernel": "nvfp4 with a static scale",
    "FlashInferCutlassNvFp4LinearKernel": "nvfp4 with a static scale",
    "CutlassNvFp4LinearKernel": "nvfp4 with a static scale",
}
"""Kernel -> quantizer of its input. Source: their `apply_weights` in vLLM 0.32."""
_FAMILY = {".linear.mxfp8.": "mxfp8", ".linear.nvfp4.": "nvfp4", ".linear.mxfp4.": "mxfp4"}
_PLAIN = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


@torch.no_grad()
def describe(inside: Inside, prove: bool) -> dict[str, dict[str, Any]]:
    """Canonical name -> fields of `base.Live`, as plain data.

    prove  look at the content too, without which plain storage cannot be said to be on a grid
    """
    wrong = {name for name, _, _ in verify(inside)} if prove else set(inside.places)
    told: dict[str, dict[str, Any]] = {}
    for module, places in inside.by_module():
        for name, place in places.items():
            kind = _plain if is_plain(module) else _quantized
            told[name] = kind(inside, module, name, holds=name not in wrong)
            told[name]["shape"] = list(place.shape)
    return told


def kernel_of(module: nn.Module) -> Any:
    """The object that multiplies, found in the layer's method or scheme; None for a plain one."""
    for holder in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if type(value).__module__.startswith("vllm.model_executor.kernels."):
                return value
            experts = getattr(value, "fused_experts", None)
            if experts is not None:
                return experts
    return None


def _plain(inside: Inside, module: nn.Module, name: str, *, holds: bool) -> dict[str, Any]:
    """Plain storage that holds the decoded values of the plan's codes is on their grid."""
    place = inside.places[name]
    dtype = _dtype(module, place)
    fmt = "absent" if dtype is None else _PLAIN.get(dtype, "unknown")
    planned = inside.plan[name].sampler_weight
    layout = f"rows {place.start}.. of {place.module}" if place.expert is None else f"expert {place.expert}"
    if planned is not None and holds:
        layout, fmt = f"{layout}, decoded {fmt}", planned
    elif fmt == "fp32" and inside.dtype == torch.float32:
        fmt = "bf16" if _fits_bf16(inside.tensors[name]) else fmt
        layout += ", widened to fp32"
    method = getattr(module, "quant_method", None)
    kernel = "oneDNN matmul" if "cpu_linear" in module.__dict__ and place.expert is None else "plain"
    if place.expert is not None:
        kernel = type(kernel_of(module)).__name__
    return {
        "format": fmt,
        "kernel": kernel if method is not None else "read as is",
        "layout": layout,
        "activation": "bf16",
    }


def _quantized(inside: Inside, module: nn.Module, name: str, *, holds: bool) -> dict[str, Any]:
    place = inside.places[name]
    if place.leaf != "weight":
        return _plain(inside, module, name, holds=holds)
    kernel = kernel_of(module)
    word = type(kernel).__name__
    dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in module._parameters.values() if x is not None})
    return {
        "format": _format(kernel, module, inside, name),
        "kernel": f"{type(module.quant_method).__name__}: {word}",
        "layout": f"{place.module} as {', '.join(dtypes)}",
        "activation": INPUTS.get(word) or _input_of(kernel),
    }


def _format(kernel: Any, module: nn.Module, inside: Inside, name: str) -> str:
    """Quantizer of the weight that a kernel reads; "unknown: ..." where this adapter cannot tell."""
    for part, fmt in _FAMILY.items():
        if part in f"{type(kernel).__module__}.":
            return _same_grid(fmt, inside.plan[name].sampler_weight)
    key = getattr(getattr(kernel, "config", None), "weight_quant_key", None)
    if key is not None:
        group = key.scale.group_shape
        shape = (int(group.row), int(group.col))
        found = {(-1, -1): "fp8_tensor", (-1, 1): "fp8_row", (1, -1): "fp8_row", (128, 128): "fp8_128x128_fp32"}.get(
            shape
        )
        if found is not None and "float8" in str(key.dtype):
            return _same_grid(found, inside.plan[name].sampler_weight)
    method = type(module.quant_method).__name__
    for word, fmt in (
        ("Mxfp8", "mxfp8"),
        ("MxFp8", "mxfp8"),
        ("NvFp4", "nvfp4"),
        ("Nvfp4", "nvfp4"),
        ("Mxfp4", "mxfp4"),
    ):
        if word in method:
            return _same_grid(fmt, inside.plan[name].sampler_weight)
    return f"unknown: {method} with {type(kernel).__name__}"


def _same_grid(found: str, planned: str | None) -> str:
    """Quantizers that are stored alike are told apart by their bytes, which `verify` compares."""
    alike = {
        "mxfp8": ("mxfp8", "mxfp8_2d"),
        "nvfp4": ("nvfp4", "nvfp4_2d"),
        "fp8_tensor": ("fp8_tensor", "fp8_tensor_pow2"),
        "fp8_row": ("fp8_row", "fp8_row_pow2"),
        "fp8_128x128_fp32": ("fp8_128x128_fp32", "fp8_128x128"),
    }.get(found, (found,))
    return planned if planned in alike and planned is not None else found


def _input_of(kernel: Any) -> str | None:
    key = getattr(getattr(kernel, "config", None), "activation_quant_key", None)
    if key is None:
        return None
    group = (int(key.scale.group_shape.row), int(key.scale.group_shape.col))
    fmt = {(1, -1): "fp8_row", (-1, -1): "fp8_tensor", (1, 128): "fp8_1x128_fp32"}.get(group)
    return None if fmt is None else fmt + (" with a static scale" if key.scale.static else "")


def _dtype(module: nn.Module, place: Place) -> torch.dtype | None:
    leaf = place.leaf if place.expert is None else ("w2_weight" if place.shard == "w2" else "w13_weight")
    held = module._parameters.get(leaf)
    return None if held is None else held.dtype


def _fits_bf16(canonical: Any) -> bool:
    x = values_of(canonical, torch.float32)
    return bool((x.to(torch.bfloat16).float() == x).all()) if isinstance(x, Tensor) else False
