"""A model so small that a whole run takes a second, and a configuration for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import save_weights
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.tokenizer import save_tokenizer

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 18,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

TOML = """
seed = 3
device = "cpu"
[model]
checkpoint = "model"
[recipe]
preset = "mxfp8"
backward = "dequantized"
[task]
digits = 1
[sampling]
max_new_tokens = 3
[sampler]
max_slots = 8
max_len = 16
[learner]
lr = 1e-2
[loop]
num_steps = 3
prompts_per_step = 4
samples_per_prompt = 4
[eval]
num_problems = 8
[checkpoint]
every = 1
keep = 9
"""


def write_tiny_run(folder: Path) -> Path:
    """A checkpoint of random weights and the configuration of a run; returns the configuration's path."""
    spec = ModelSpec.from_hf_config(CONFIG)
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(spec).items()
    weights = {n: torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * 0.3 for n, s in shapes}
    save_weights({n: t.to(torch.bfloat16) for n, t in weights.items()}, CONFIG, folder / "model")
    save_tokenizer(CharacterTokenizer(), folder / "model")
    (folder / "run.toml").write_text(TOML)
    return folder / "run.toml"


def lines_without_clocks(run_dir: Path) -> list[str]:
    """metrics.jsonl as text, line by line, with what only a clock or a memory counter knows taken out."""
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [json.dumps({k: v for k, v in line.items() if not k.startswith("perf/")}, sort_keys=True) for line in lines]
