"""One compiled callable for both sides, or the eager one where this machine cannot compile. The bytes are the same."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under `torch.compile`, or `fn` itself, with one warning, where nothing can compile for the input's device.

    fn  takes a tensor first, whose device decides

    Learner and sampler must call the same returned callable; never compile one side's whole model.
    """
    fast = torch.compile(fn, dynamic=True)

    @wraps(fn)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (fast if can_compile(x.device.type) else fn)(x, *args, **kwargs)

    return call


@lru_cache
def can_compile(device_type: str) -> bool:
    """Whether a C++ compiler (CPU) or Triton (GPU) is there; says so once if not."""
    if device_type == "cpu":
        found = any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl"))
        missing = "no C++ compiler (g++ or clang++) on the path"
    else:
        found = importlib.util.find_spec("triton") is not None
        missing = "Triton is not installed"
    if not found:
        warnings.warn(f"{missing}: quantizers run eagerly, with the same bytes but slower", stacklevel=3)
    return found
