"""Small models for the quickstarts, supervised until they answer some problems, so that reinforcement has a start.

Two-digit addition; problems that are held out (a hash of their text) are never trained on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.live import LiveWeights
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import save_weights
from onegrid.recipe import preset, resolve
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.evaluate import EvalConfig, evaluate
from onegrid.rl.loop import snapshot
from onegrid.rl.supervised import answered, supervised_step
from onegrid.rl.tasks import ArithmeticTask
from onegrid.rl.tokenizer import save_tokenizer
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from onegrid.types import Sampling

SHARED: dict[str, Any] = {
    "vocab_size": CharacterTokenizer().vocab_size,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": CharacterTokenizer.eos_token_id,
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": SHARED
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "dense": SHARED | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 384},
}


def random_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Normal with standard deviation .02, norms 1, and matrices that write to the residual scaled by its depth."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(spec).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        std = 0.02 * (2 * spec.num_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 0.02
        weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def make_start(
    config: Mapping[str, Any], folder: Path, *, seed: int, target: float, max_steps: int, every: int = 5
) -> float:
    """Write a checkpoint as soon as its greedy held-out accuracy, in BF16, has reached the target; print the way there.

    config  of the model, as in MODELS
    every   steps of 256 problems between two measurements
    Returns the accuracy, which is below the target if `max_steps` came first.
    """
    spec = ModelSpec.from_hf_config(config)
    tokenizer = CharacterTokenizer()
    plan = resolve(preset("bf16"), config, tensor_shapes(spec))
    learner_config = LearnerConfig(lr=2e-3, warmup_steps=30, beta2=0.98, weight_decay=0.01)
    learner = Learner(spec, plan, random_weights(spec, seed), learner_config)
    live = LiveWeights(spec, plan, side="sampler")
    sampler = Engine(live, SamplerConfig(max_slots=256, max_len=16), decode_text=tokenizer.decode)
    task = ArithmeticTask(tokenizer, num_prompts=256, seed=seed, digits=2)
    sampling = Sampling(max_new_tokens=5, stop_token_ids=(tokenizer.eos_token_id,))
    problems = EvalConfig(num_problems=512)
    began, accuracy = time.perf_counter(), 0.0
    for step in range(1, max_steps + 1):
        metrics = supervised_step(learner, answered(task.prompts(step), tokenizer, end_token_id=tokenizer.eos_token_id))
        if step % every == 0:
            push(snapshot(learner), sampler)
            accuracy = evaluate(task, sampler, problems, sampling=sampling)["eval/held_out/accuracy"]
            seconds = time.perf_counter() - began
            print(
                f"step {step:4d}  loss {metrics['train/loss']:.4f}  held-out {accuracy:.3f}  {seconds:.0f} s",
                flush=True,
            )
            if accuracy >= target:
                break
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.to(torch.bfloat16) for name, t in learner.tensors().items()}
    save_weights(weights, config, folder)
    save_tokenizer(tokenizer, folder)
    return accuracy
