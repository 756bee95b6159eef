"""Angles of the rotary embedding by family of scaling, FP32, one table for both sides.

Sources: Su et al. arXiv 2104.09864 (plain), linear interpolation arXiv 2306.15595, the Llama 3.1 frequency split,
YaRN arXiv 2309.00071.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onegrid.model.spec import ModelSpec


def rope_table(spec: ModelSpec, num_positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of every position, FP32 [num_positions, head_dim / 2]. Computed on the CPU so that devices agree."""
    frequency, scale = _frequencies(spec)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency[None]
    # float64 inside: the library's float32 cosine differs between processors
    cos = (angle.double().cos() * scale).float()
    sin = (angle.double().sin() * scale).float()
    return cos.to(device), sin.to(device)


def _frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """Inverse frequencies FP32 [head_dim / 2] and the factor on cos and sin."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponent)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain, 1.0
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return plain / factor, 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, spec, scaling)


def _llama3(plain: Tensor, scaling: dict) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, a linear blend between."""
    original, factor = scaling["original_max_position_embeddings"], float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blend = (1 - smooth) * plain / factor + smooth * plain
    out = torch.where(wavelength > original / low, plain / factor, plain)
    middle = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(middle, blend, out)


def _yarn(plain: Tensor, spec: ModelSpec, scaling: dict) -> tuple[Tensor, float]:
    """Interpolates slow dimensions, keeps fast ones, ramps between; scales attention by the mscale rule."""
    factor, original = float(scaling["factor"]), scaling["original_max_position_embeddings"]
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def dimension(rotations: float) -> float:
        return spec.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low, high = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    ramp = (torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    frequency = plain / factor * (1 - keep) + plain * keep
    scale = scaling.get("attention_factor")
    if scale is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scale = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return frequency, float(scale)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
