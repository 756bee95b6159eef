"""Tiny models with random weights, as a learner would publish them."""

from __future__ import annotations

from dataclasses import replace

import torch

from onegrid.model.canonical import Snapshot, parts_of
from onegrid.model.live import LiveWeights
from onegrid.model.publish import publish
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack
from onegrid.recipe import PRESETS, Plan, resolve
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.types import Request, Sampling

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SHARED = MOE | {"model_type": "qwen2_moe", "head_dim": None, "shared_expert_intermediate_size": 48}
MODELS = {"dense": DENSE, "moe": MOE, "shared": SHARED}


def plan_of(model: str, preset: str, **recipe: object) -> tuple[ModelSpec, Plan]:
    """Spec and plan of one of MODELS, with fields of the recipe replaced."""
    spec = ModelSpec.from_hf_config(MODELS[model])
    return spec, resolve(replace(PRESETS[preset], **recipe), MODELS[model], tensor_shapes(spec))  # type: ignore[arg-type]


def snapshot_of(spec: ModelSpec, plan: Plan, seed: int, *, version: int, scale: float = 0.3) -> Snapshot:
    """Random weights of `seed`, on the plan's grid."""
    twin = LiveWeights(spec, plan, side="sampler")
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(spec)
    values = {}
    for key, names in twin.keys.items():
        shape = (len(names), *shapes[names[0]]) if is_stack(key) else shapes[names[0]]
        noise = torch.randn(shape, generator=generator) * scale
        values[key] = (noise if len(shape) > 1 else 1 + 0.1 * noise).to(torch.bfloat16)
    for key, value in publish(values, twin.keys, plan, side="sampler").items():
        twin.write(key, value)
    return Snapshot(
        version=version, plan_digest=plan.digest, tensors={name: twin.canonical(name) for name in twin.names()}
    )


def loaded(
    snapshot: Snapshot, spec: ModelSpec, plan: Plan, device: torch.device | str = "cpu", *, weights: str = "auto"
) -> LiveWeights:
    """Weights that hold a snapshot without any synchronization."""
    live = LiveWeights(spec, plan, side="sampler", device=device, weights=weights)
    for name, tensor in snapshot.tensors.items():
        for part, held in live.parts(name).items():
            held.copy_(parts_of(tensor)[part])
    live.derive()
    return live


def engine_of(
    model: str, preset: str, seed: int = 0, *, device: torch.device | str = "cpu", **config: object
) -> Engine:
    """An engine that serves version 0 of random weights."""
    spec, plan = plan_of(model, preset)
    settings = SamplerConfig(**{"max_slots": 24, "max_len": 64, **config})  # type: ignore[arg-type]
    live = loaded(snapshot_of(spec, plan, seed, version=0), spec, plan, device, weights=settings.weights)
    return Engine(live, settings, version=0)


def requests_of(count: int, *, samples: int = 3, seed: int = 7, vocab: int = 40, **sampling: object) -> list[Request]:
    """Prompts of 1 to 9 tokens, `samples` of each."""
    made = Sampling(**{"max_new_tokens": 7, "stop_token_ids": (3, 5), **sampling})  # type: ignore[arg-type]
    return [
        Request(
            prompt_index=i // samples,
            sample=i % samples,
            prompt_tokens=tuple((11 * (i // samples) + 5 * j) % vocab for j in range(1 + (i // samples * 5) % 9)),
            seed=seed,
            sampling=made,
        )
        for i in range(count)
    ]
