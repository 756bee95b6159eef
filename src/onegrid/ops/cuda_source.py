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
    return _Launched(made, bool(dict(macros).get("EARLY")))


class TensorMap:
    """A matrix as the copy engine reads it: rectangles of `rows` rows of `width` bytes, see `tensor_copy`.

    x_NK  [N, K] on a GPU, rows one after another, each a multiple of 16 bytes; BF16, or numbers of one byte. The map
          keeps its address: it is good while the memory is.
    width 128, and pieces of 16 bytes are swapped, or 16
    """

    def __init__(self, x_NK: torch.Tensor, rows: int, width: int = 128) -> None:
        num_rows, depth = x_NK.shape
        self.x, self.rows, self.width = x_NK, rows, width
        size = x_NK.element_size()
        self._room = (ctypes.c_ubyte * 192)()
        self.address = -(-ctypes.addressof(self._room) // 64) * 64
        if not x_NK.is_cuda:
            return  # tests run kernels on a CPU
        code = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            {1: 0, 2: 9}[size],  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _BFLOAT16
            2,
            ctypes.c_void_p(x_NK.data_ptr()),
            (ctypes.c_uint64 * 2)(depth, num_rows),
            (ctypes.c_uint64 * 1)(depth * size),
            (ctypes.c_uint32 * 2)(width // size, rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            3 if width == 128 else 0,  # CU_TENSOR_MAP_SWIZZLE_128B, _NONE
            2,  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        )
        if code:
            raise RuntimeError(f"cuTensorMapEncodeTiled answered {code} for {tuple(x_NK.shape)} of {size} bytes")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


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


class _Launched:
    """A compiled kernel; `early`: launched before the kernel before it has ended."""

    def __init__(self, made: Any, early: bool) -> None:
        self.made, self.early = made, early

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], shared_bytes: int = 0) -> None:
        held = [_argument(a) for a in args]
        pointers = (ctypes.c_void_p * len(held))(
            *(a.address if isinstance(a, TensorMap) else ctypes.addressof(a) for a in held)
        )
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(*grid, *block, shared_bytes, stream, ctypes.pointer(attribute), int(self.early))
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), self.made.func, pointers, None)
        if code:
            raise RuntimeError(f"cuLaunchKernelEx answered {code}")


def _argument(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return ctypes.c_void_p(a.data_ptr())
    return a if isinstance(a, TensorMap) else ctypes.c_int(a)
