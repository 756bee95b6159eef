"""Tiny GGUF files, written by the ecosystem's writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from onegrid.model.spec import ModelSpec, tensor_shapes

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "h e", "l l", "he ll", "hell o", "Ġ 1", "Ġ Ġ", "d Ġ"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)


def byte_characters() -> list[str]:
    """The characters that byte-level BPE writes bytes as."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tokens() -> list[str]:
    """Special ones, bytes, merges."""
    return [*SPECIAL, *byte_characters(), *("".join(merge.split()) for merge in MERGES)]


def weights_of(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights that BF16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).to(torch.bfloat16).float()
        for name, shape in tensor_shapes(spec).items()
    }


def write_gguf(
    path: Path, spec: ModelSpec, weights: dict[str, torch.Tensor], *, kind: Kind = Kind.F32, **fields: Any
) -> None:
    """A whole model with a tokenizer. fields replaces or, by None, removes entries."""
    name = ARCHITECTURES[spec.family]
    writer = GGUFWriter(path, name)
    values: dict[str, Any] = {
        f"{name}.block_count": spec.num_layers,
        f"{name}.context_length": spec.max_positions,
        f"{name}.embedding_length": spec.hidden_size,
        f"{name}.feed_forward_length": spec.intermediate_size,
        f"{name}.attention.head_count": spec.num_heads,
        f"{name}.attention.head_count_kv": spec.num_kv_heads,
        f"{name}.attention.key_length": spec.head_dim,
        f"{name}.attention.value_length": spec.head_dim,
        f"{name}.rope.dimension_count": spec.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(spec.rms_eps),
        f"{name}.rope.freq_base": float(spec.rope_theta),
        f"{name}.vocab_size": spec.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    if spec.num_experts:
        values |= {
            f"{name}.expert_count": spec.num_experts,
            f"{name}.expert_used_count": spec.top_k,
            f"{name}.expert_feed_forward_length": spec.moe_intermediate_size,
        }
    if spec.shared_expert_intermediate_size:
        values[f"{name}.expert_shared_feed_forward_length"] = spec.shared_expert_intermediate_size
    for key, value in (values | fields).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for raw, array in _raw(spec, weights).items():
        stored = kind if array.ndim >= 2 and "inp" not in raw else Kind.F32
        if stored is Kind.F32:
            writer.add_tensor(raw, array)
        else:
            writer.add_tensor(raw, gguf.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _raw(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """As llama.cpp names, stacks and turns them."""
    ends = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in weights.items():
        stem, _, suffix = name.rpartition(".")
        if stem in whole:
            stacks[f"{whole[stem]}.{suffix}"] = [tensor.numpy()]
            continue
        _, _, layer, rest = stem.split(".", 3)
        pieces = rest.split(".")
        if "experts" in pieces:
            del pieces[pieces.index("experts") + 1]
        end = ends[".".join(pieces)]
        if spec.family == "llama" and end in ("attn_q", "attn_k"):
            heads = spec.num_heads if end == "attn_q" else spec.num_kv_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        stacks.setdefault(f"blk.{layer}.{end}.{suffix}", []).append(tensor.numpy())
    out = {}
    for raw, parts in stacks.items():
        array = np.stack(parts) if "_exps" in raw else parts[0]
        out[raw] = np.ascontiguousarray(array[0] if raw.endswith("inp_shexp.weight") else array)
    return out
