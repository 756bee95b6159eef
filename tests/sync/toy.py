"""A snapshot with every kind of part: codes with scales, codes with scales and amax, packed codes, plain values."""

from __future__ import annotations

import torch

from onegrid.formats import QUANTIZERS, quantize
from onegrid.model.canonical import Snapshot, parts_of
from onegrid.sampler.fake import FakeSampler
from onegrid.types import Request, Sampling

SHAPES = {"gate": ("mxfp8", (6, 64)), "up": ("mxfp8", (6, 64)), "down": ("nvfp4", (5, 32)), "row": ("fp8_row", (3, 9))}


def snapshot_of(seed: int, version: int, *, device: torch.device | str = "cpu") -> Snapshot:
    """Random tensors of a seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (quantizer, shape) in SHAPES.items():
        x_MK = torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)
        tensors[name] = quantize(x_MK, QUANTIZERS[quantizer])
    tensors["norm"] = torch.randn(7, generator=generator).to(torch.bfloat16).to(device)
    return Snapshot(version=version, plan_digest="plan", tensors=tensors)


def parts_by_key(tensors: dict) -> dict[tuple[str, str], torch.Tensor]:
    """Every part of every tensor."""
    return {(name, part): x for name, tensor in tensors.items() for part, x in parts_of(tensor).items()}


def live_parts(sampler: FakeSampler) -> list[torch.Tensor]:
    """Copies of all that the sampler holds, operands included."""
    return [x.clone() for x in [*parts_by_key(sampler.store.tensors).values(), *sampler.store.operands.values()]]


def requests_of(count: int = 4, **sampling: object) -> list[Request]:
    """Requests of one prompt each."""
    made = Sampling(**{"max_new_tokens": 6, **sampling})  # type: ignore[arg-type]
    return [Request(prompt_index=i, sample=0, prompt_tokens=(i, i + 1), seed=3, sampling=made) for i in range(count)]
