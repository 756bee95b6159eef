"""Small checkpoints to convert, and what their weights must become."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onegrid.formats import QUANTIZERS, QuantTensor, dequantize, quantize
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import save_weights
from onegrid.recipe import Plan
from tests.model.tiny import config_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "moe_intermediate_size": 32}
WIDTHS = {"dense": "qwen3", "moe": "qwen3_moe"}


def bf16_model(folder: Path, kind: str = "dense", *, max_shard_bytes: int = 10**9, **change) -> dict[str, Tensor]:
    """A random BF16 checkpoint; q, k and v have different ranges, and so have gate and up."""
    sizes = SIZES if kind == "moe" else {k: v for k, v in SIZES.items() if k != "moe_intermediate_size"}
    spec = ModelSpec.from_hf_config(config_of(WIDTHS[kind], **(sizes | change)))
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for i, (name, shape) in enumerate(tensor_shapes(spec).items()):
        weights[name] = (torch.randn(shape, generator=generator) * 0.02 * (1 + i % 5)).bfloat16()
    save_weights(weights, spec, folder, max_shard_bytes=max_shard_bytes)
    return weights


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its key on disk."""
    return {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def quantized(weights: dict[str, Tensor], plan: Plan, name: str) -> QuantTensor:
    """The weight as `formats` quantizes it, with the amax of all weights of its group."""
    planned = plan[name]
    quantizer = QUANTIZERS[str(planned.sampler_weight)]
    amax = None
    if quantizer.span == "tensor":
        group = [t.name for t in plan.tensors.values() if t.amax_group and t.amax_group == planned.amax_group] or [name]
        amax = torch.stack([weights[n].bfloat16().abs().amax().float() for n in group]).amax()
    return quantize(weights[name].bfloat16(), quantizer, amax=amax)


def expected(weights: dict[str, Tensor], plan: Plan, name: str) -> Tensor:
    """The weight after quantizing and decoding, in BF16; itself where the plan keeps it."""
    if plan[name].sampler_weight is None:
        return weights[name]
    return dequantize(quantized(weights, plan, name), torch.bfloat16)


def write(folder: Path, config: dict, *shards: dict[str, Tensor], index: dict | None = None) -> Path:
    """A checkpoint from raw tensors: one file, or shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1 and index is None:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | (index or {})}))
    return folder
