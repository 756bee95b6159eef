"""CUDA C++ of this folder behind `primitives.cu`, compiled by NVRTC (which torch brings along) when first used."""

from __future__ import annotations

import ctypes
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
    """`function` of `file` with macros set: call it with (grid, block, arguments, shared_bytes). Compiled once.

    EARLY=1 among the macros says that it waits by itself for the kernel before it: it is launched before that one ends.
    """
    return _compiled(file, function, shared_bytes, tuple(sorted(macros.items())), torch.cuda.current_device())


@cache
def _compiled(file: str, function: str, shared_bytes: int, macros: tuple[tuple[str, int], ...], device: int) -> Any:
    source = "".join(f"#define {name} {value}\n" for name, value in macros)
    source += "".join(Path(__file__).with_name(part).read_text(encoding="utf-8") for part in ("primitives.cu", file))
    capability = "{}{}a".format(*torch.cuda.get_device_capability(device))
    made = torch.cuda._compile_kernel(source, function, capability)
    if shared_bytes:
        made.set_shared_memory_config(shared_bytes)
    return _Early(made) if dict(macros).get("EARLY") else made


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Early:
    """A compiled kernel that `cuLaunchKernelEx` launches before the one before it has ended."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.driver = ctypes.CDLL("libcuda.so.1")

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], shared_bytes: int = 0) -> None:
        held = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(*grid, *block, shared_bytes, stream, ctypes.pointer(attribute), 1)
        code = self.driver.cuLaunchKernelEx(ctypes.byref(config), self.made.func, pointers, None)
        if code:
            raise RuntimeError(f"cuLaunchKernelEx answered {code}")
