"""Indexes of small models, for recipe tests: names and shapes only."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]

D, F, V = 32, 48, 64


def mlp(at: str, width: int = F) -> Shapes:
    """Gate, up and down of one MLP or expert."""
    return {f"{at}.{n}_proj.weight": (D, width) if n == "down" else (width, D) for n in ("gate", "up", "down")}


def attention(at: str) -> Shapes:
    """Grouped-query attention with biases and head norms."""
    shapes: Shapes = {f"{at}.{n}_proj.weight": (D, D) for n in "qkvo"}
    return shapes | {f"{at}.q_proj.bias": (D,), f"{at}.q_norm.weight": (8,), f"{at}.k_norm.weight": (8,)}


def qwen_moe(num_layers: int = 4, *, tied: bool = False) -> tuple[dict, Shapes]:
    """A model with a dense layer 0, two experts, a shared expert and its gate."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        shapes |= attention(f"{at}.self_attn") | {f"{at}.input_layernorm.weight": (D,)}
        if layer == 0:
            shapes |= mlp(f"{at}.mlp")
            continue
        shapes |= mlp(f"{at}.mlp.experts.0", 16) | mlp(f"{at}.mlp.experts.1", 16) | mlp(f"{at}.mlp.shared_expert")
        shapes |= {f"{at}.mlp.gate.weight": (2, D), f"{at}.mlp.shared_expert_gate.weight": (1, D)}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    return {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}, shapes


def deepseek_v3(num_layers: int = 3) -> tuple[dict, Shapes]:
    """DeepSeek-V3 names: latent attention, shared experts, router correction, FP8 scales, one layer of MTP."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for layer in range(num_layers + 1):
        at = f"model.layers.{layer}"
        for name, shape in (
            ("q_a_proj", (16, D)),
            ("q_b_proj", (D, 16)),
            ("kv_a_proj_with_mqa", (24, D)),
            ("kv_b_proj", (64, 16)),
            ("o_proj", (D, 32)),
        ):
            shapes[f"{at}.self_attn.{name}.weight"] = shape
            shapes[f"{at}.self_attn.{name}.weight_scale_inv"] = (1, 1)
        shapes |= {f"{at}.self_attn.q_a_layernorm.weight": (16,), f"{at}.self_attn.kv_a_layernorm.weight": (16,)}
        if layer == 0:
            shapes |= mlp(f"{at}.mlp")
            continue
        shapes |= mlp(f"{at}.mlp.experts.0", 16) | mlp(f"{at}.mlp.experts.1", 16) | mlp(f"{at}.mlp.shared_experts")
        shapes |= {f"{at}.mlp.gate.weight": (2, D), f"{at}.mlp.gate.e_score_correction_bias": (2,)}
    at = f"model.layers.{num_layers}"
    shapes |= {f"{at}.eh_proj.weight": (D, 2 * D), f"{at}.enorm.weight": (D,), f"{at}.hnorm.weight": (D,)}
    shapes |= {f"{at}.embed_tokens.weight": (V, D), f"{at}.shared_head.head.weight": (V, D)}
    shapes |= {f"{at}.shared_head.norm.weight": (D,)}
    return {"model_type": "deepseek_v3", "num_hidden_layers": num_layers}, shapes
