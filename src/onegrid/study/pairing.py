"""A pairing so small that a run takes a second, for faults to go into: loop, learner and engine are the real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from onegrid.guard.guard import Guard
from onegrid.guard.injection import Bench
from onegrid.learner.config import LearnerConfig, LoraConfig
from onegrid.learner.learner import Learner
from onegrid.model.live import LiveWeights
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import preset, resolve
from onegrid.rl import checkpoint
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.dynamic import DynamicConfig
from onegrid.rl.evaluate import EvalConfig
from onegrid.rl.loop import train
from onegrid.rl.loop_config import LoopConfig
from onegrid.rl.old_policy import CorrectionConfig
from onegrid.rl.progress import Display
from onegrid.rl.record import Record, RecordConfig
from onegrid.rl.tasks import ArithmeticTask, Prompt
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.types import Sampling

AT = 2
"""First version that a fault touches: that of the third synchronization, so that the one before has served."""
STEPS = AT + 1

BASE: dict[str, Any] = {
    "vocab_size": CharacterTokenizer().vocab_size,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "eos_token_id": CharacterTokenizer.eos_token_id,
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": BASE
    | {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "tied": BASE | {"model_type": "qwen3", "tie_word_embeddings": True},
}


WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Widths that packed kernels cover, and weights that are large enough for them (`ops.matmul_choice.SMALLEST`)."""


class Sums(ArithmeticTask):
    """The same prompts in every step, and a reward that differs between almost any two answers.

    So every step moves weights, and a prompt is met again after each synchronization.
    """

    def prompts(self, step: int, attempt: int = 0) -> list[Prompt]:
        """Those of step 0, under indices of their own."""
        first = step * self._num_prompts
        return [replace(p, prompt_index=first + i) for i, p in enumerate(super().prompts(0))]

    def score(self, prompt: Prompt, text: str) -> float | None:
        """A number in 0 .. 1 from the characters."""
        return sum(map(ord, text)) % 7 / 6


def make_bench(model: str = "moe", recipe: str = "mxfp8", *, device: str = "cpu", weights: str = "auto") -> Bench:
    """Learner with random weights and an engine that waits for them.

    model    of MODELS, or "adapted": "moe" with adapters on every linear
    weights  of the sampler: see `SamplerConfig`; with "codes" on a GPU the model is wide enough for packed kernels
    """
    adapters = LoraConfig(rank=2, alpha=8.0) if model == "adapted" else None
    config = MODELS["moe" if adapters else model]
    if is_wide(weights, device):
        config = config | WIDE
    spec = ModelSpec.from_hf_config(config)
    shapes = tensor_shapes(spec)
    plan = resolve(preset(recipe), config, shapes, backward="dequantized")
    generator = torch.Generator().manual_seed(0)
    spread = 0.2 * (BASE["hidden_size"] / spec.hidden_size) ** 0.5
    tensors = {n: torch.randn(s, generator=generator) * spread + (len(s) == 1) for n, s in shapes.items()}
    learner = Learner(spec, plan, tensors, LearnerConfig(lr=1e-2, lora=adapters), device=device)
    live = LiveWeights(spec, plan, side="sampler", device=device, weights=weights)
    engine = Engine(live, SamplerConfig(max_slots=6, max_len=16), decode_text=CharacterTokenizer().decode)
    return Bench(learner, engine, at=AT)


def is_wide(weights: str, device: str) -> bool:
    """Whether the model has widths that packed kernels cover, where these read codes."""
    return weights == "codes" and torch.device(device).type == "cuda"


def device_name(device: str) -> str:
    """What a record calls a device: the name of the GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def run_loop(
    bench: Bench, guard: Guard, folder: Path, *, num_steps: int = STEPS, every: int = 0, resume: bool = False
) -> None:
    """`rl.loop.train` on the bench; raises what the loop raises. The record is in `folder`.

    every   steps between checkpoints, 0: only the last
    resume  go on from the last checkpoint of `folder`, or from the start where there is none
    """
    tokenizer = CharacterTokenizer()
    last = checkpoint.latest(folder) if resume else None
    state = checkpoint.load(last) if last else None
    train(
        Sums(tokenizer, num_prompts=2, seed=0, digits=1),
        bench.learner,
        bench.sampler,
        guard=guard,
        config=LoopConfig(num_steps=num_steps, prompts_per_step=2, samples_per_prompt=4),
        sampling=Sampling(max_new_tokens=4, stop_token_ids=(CharacterTokenizer.eos_token_id,)),
        seed=0,
        tokenizer=tokenizer,
        record=Record(
            folder,
            config=RecordConfig(rollouts_every=0),
            resume_step=(state["step"] if state else -1) if resume else None,
        ),
        display=Display(num_steps, console=Console(quiet=True)),
        dynamic=DynamicConfig(),
        correction=CorrectionConfig(),
        evaluation=EvalConfig(num_problems=0),
        checkpoints=checkpoint.CheckpointConfig(every=every),
        state=state,
    )
