"""Real engines with tiny models, and snapshots to send to them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegrid.convert.source import open_source
from onegrid.formats import dequantize
from onegrid.model.canonical import Canonical, Snapshot
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import Plan, Recipe, preset, resolve
from onegrid.sampler.vllm.adapter import VllmSampler
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.sampler.vllm.verify import Inside
from onegrid.sync import SyncReport, push
from tests.sampler.tiny import DENSE, MOE, snapshot_of

MODELS = {
    "dense": DENSE | {"head_dim": 32, "architectures": ["Qwen3ForCausalLM"]},
    "untied": DENSE | {"head_dim": 32, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
    "moe": MOE | {"head_dim": 32, "architectures": ["Qwen3MoeForCausalLM"]},
}
MAX_LEN = 80


@dataclass
class Running:
    """A live engine and what it runs."""

    sampler: VllmSampler
    spec: ModelSpec
    plan: Plan
    hf_config: dict[str, Any]
    versions: Any = field(default_factory=lambda: itertools.count())

    def snapshot(self, seed: int | None = None) -> Snapshot:
        """Random weights on the plan's grid, at the next version."""
        version = next(self.versions)
        return snapshot_of(self.spec, self.plan, version if seed is None else seed, version=version)

    def push(self, snapshot: Snapshot | None = None, **how: Any) -> SyncReport:
        """A synchronization."""
        return push(self.snapshot() if snapshot is None else snapshot, self.sampler, **how)

    @property
    def inside(self) -> Inside:
        """What the worker knows of its model; only in this process."""
        return self.sampler.engine.engine.collective_rpc(lambda worker: worker._onegrid)[0]


def weights_only(recipe: Recipe) -> Recipe:
    """The recipe for a sampler that does not quantize activations."""
    rules = (dataclasses.replace(r, sampler_activation=None) if r.weight else r for r in recipe.rules)
    return dataclasses.replace(recipe, rules=tuple(rules))


def plan_of(config: dict[str, Any], recipe: Recipe | str, *, inputs: bool = False, **fields: Any) -> Plan:
    """inputs: whether the sampler quantizes them too."""
    recipe = preset(recipe) if isinstance(recipe, str) else recipe
    recipe = dataclasses.replace(recipe if inputs else weights_only(recipe), **fields)
    return resolve(recipe, config, tensor_shapes(ModelSpec.from_hf_config(config)))


def start(
    kind: str,
    recipe: Recipe | str = "mxfp8",
    *,
    inputs: bool = False,
    checkpoint: Path | None = None,
    share_qkv_amax: bool = False,
    change: dict[str, Any] | None = None,
    **config: Any,
) -> Running:
    """An engine that waits for its first version, or serves a checkpoint that it has loaded by itself as version 0."""
    hf_config = MODELS[kind] | (change or {})
    spec = ModelSpec.from_hf_config(hf_config)
    plan = plan_of(hf_config, recipe, inputs=inputs, share_qkv_amax=share_qkv_amax)
    loaded = None if checkpoint is None else content(checkpoint, plan)
    sampler = VllmSampler(
        spec,
        hf_config,
        plan,
        VllmConfig(**{"kv_cache_bytes": 1 << 25, **config}),
        max_len=MAX_LEN,
        max_slots=16,
        checkpoint=checkpoint,
        loaded=loaded,
    )
    return Running(sampler, spec, plan, hf_config, itertools.count(0 if loaded is None else 1))


def content(folder: Path, plan: Plan) -> Snapshot:
    """What a checkpoint holds, read by our own reader."""
    source = open_source(folder)
    tensors: dict[str, Canonical] = {name: source.read(name) for name in plan.tensors}
    source.close()
    return Snapshot(version=0, plan_digest=plan.digest, tensors=tensors)


def numbers(canonical: Canonical) -> Tensor:
    """BF16 values that a tensor stands for."""
    return canonical if isinstance(canonical, Tensor) else dequantize(canonical, torch.bfloat16)


def kernel_reads(running: Running, name: str) -> Tensor:
    """[N, K] that the live kernel of a linear multiplies by: its product with the identity."""
    width = running.plan[name].shape[1]
    return running.sampler.multiply(name, torch.eye(width, dtype=torch.bfloat16)).T.contiguous()
