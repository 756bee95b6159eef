"""Tiny models of every family, as configs and as transformers makes them."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}


def config_of(family: str, **change: Any) -> dict[str, Any]:
    """A config dict: hidden 32, two layers; of experts, four of width 16 in layer 1, layer 0 dense."""
    config = {"model_type": family, **BASE, **(EXPERTS if family.endswith("_moe") else {})}
    if family == "qwen2_moe":
        config["shared_expert_intermediate_size"] = 24
    return config | change


def transformers_model(family: str, **change: Any):
    """A random model in FP32 with that config, the same for the same arguments."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(family, **change))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)
