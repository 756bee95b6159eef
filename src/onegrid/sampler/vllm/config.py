"""How vLLM is started as a sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from onegrid.errors import ConfigError

Road = Literal["decoded", "online", "modelopt", "compressed-tensors", "deepseek"]
"""In which language weights go into the engine: see `VllmConfig.road`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmConfig:
    """Section `[sampler.vllm]`. How many completions run at once, and how long, stands in `[sampler]`."""

    road: Road = "decoded"
    """"decoded": grid values in a plain engine, which always runs; activations are then not quantized, and the plan
    must say so. "modelopt", "compressed-tensors" or "deepseek": codes and scales in that layout, for kernels that read
    them; vLLM 0.24 ties no head of a Llama beside "modelopt". "online": the engine gets grid values and quantizes them
    itself."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the engine computes in. FP32 is slow on GPUs, and an oracle for the learner on a CPU."""
    apart: bool = False
    """Run the engine in a process of its own. Weights then travel through a file in shared memory."""
    logprobs: Literal["processed", "raw"] = "processed"
    """"processed": of the distribution that was sampled from. "raw": before temperature, for temperature 1 only."""
    eager: bool = True
    """Neither compile nor capture graphs."""
    kv_cache_bytes: int = 1 << 30
    """Memory of the key/value cache."""
    prefix_cache: bool = True
    """Share the prefixes of prompts. They are dropped with every version."""
    sleep_level: int = 0
    """What sleep gives back: 0 nothing, 1 weights to the host and the cache, 2 both dropped; weights are then loaded
    again from the canonical bytes. vLLM does this on GPUs only."""
    emulate: bool = False
    """On a CPU: let vLLM use its own emulation of MXFP8 and NVFP4 linears, which it offers to GPUs only."""
    allow_unknown_version: bool = False
    """Run with a vLLM that this adapter was not tested with."""
    allow_unknown_kernel: bool = False
    """Serve although the adapter does not know what a kernel does with its inputs; the audit then cannot tell."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, such as tensor sizes of its scheduler. They come last."""

    def __post_init__(self) -> None:
        if self.kv_cache_bytes < 1 << 20:
            raise ConfigError(f"kv_cache_bytes is {self.kv_cache_bytes}; it must be at least 1 MiB ({1 << 20})")
        if self.sleep_level not in (0, 1, 2):
            raise ConfigError(f"sleep_level is {self.sleep_level}; it must be 0, 1 or 2")
        if self.emulate and self.apart:
            raise ConfigError("emulate registers kernels in this process; it cannot be combined with apart")
        taken = {"model", "worker_extension_cls", "logprobs_mode", "load_format", "dtype", "quantization"}
        if self.arguments.get("trust_remote_code"):
            raise ConfigError("arguments.trust_remote_code is set; no code of a checkpoint is run here")
        if clash := sorted(taken & self.arguments.keys()):
            raise ConfigError(f"arguments names {', '.join(clash)}, which follow from the plan and the other keys")
        if self.arguments.get("tensor_parallel_size", 1) != 1:
            raise ConfigError("arguments.tensor_parallel_size is above 1; this adapter proves one shard only")
