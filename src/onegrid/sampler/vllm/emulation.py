"""vLLM's own emulation of MXFP8 and NVFP4 linears, offered to a CPU too.

vLLM lists these kernels for GPUs only, though they are plain PyTorch. The registration is of this process alone.
"""

from __future__ import annotations


def register() -> None:
    """Puts the emulation kernels into vLLM's tables for CPUs; harmless where they are there already."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    for table, kernel in (
        ("_POSSIBLE_MXFP8_KERNELS", "EmulationMxfp8LinearKernel"),
        ("_POSSIBLE_NVFP4_KERNELS", "EmulationNvFp4LinearKernel"),
        ("_POSSIBLE_MXFP4_KERNELS", "EmulationMxfp4LinearKernel"),
    ):
        kernels = getattr(linear, table).setdefault(PlatformEnum.CPU, [])
        if getattr(linear, kernel) not in kernels:
            kernels.append(getattr(linear, kernel))
