"""CUDA C++ of this folder, compiled by NVRTC (which torch brings along) when first used."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch


def can_compile(device: torch.device) -> bool:
    """Whether the kernels run there: NVIDIA's compute capability 9.0 and up, a torch that gives access to NVRTC."""
    return (
        device.type == "cuda"
        and hasattr(torch.cuda, "_compile_kernel")
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def kernel(file: str, function: str, *, shared_bytes: int = 0, **macros: int) -> Any:
    """`function` of `file` with macros set: call it with (grid, block, arguments, shared_bytes). Compiled once."""
    return _compiled(file, function, shared_bytes, tuple(sorted(macros.items())), torch.cuda.current_device())


@cache
def _compiled(file: str, function: str, shared_bytes: int, macros: tuple[tuple[str, int], ...], device: int) -> Any:
    source = "".join(f"#define {name} {value}\n" for name, value in macros)
    source += Path(__file__).with_name(file).read_text(encoding="utf-8")
    made = torch.cuda._compile_kernel(source, function)
    if shared_bytes:
        made.set_shared_memory_config(shared_bytes)
    return made
