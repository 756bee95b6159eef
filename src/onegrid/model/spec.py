"""What a model is: the sizes and switches of one decoder, read from and written to a Hugging Face `config.json`.

A spec holds exactly what the decoder computes with; a config that asks for more than it can do is refused here,
where the file can still be named, and not in the middle of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onegrid.errors import SpecError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` that the decoder runs."""

ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Rope types beyond the plain one: (keys that must be there, keys that may be)."""

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000
"""Of a model, and of all its layers together: a file that claims more would fill the memory with names."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes and switches of one decoder. Built by `from_hf_config`; impossible shapes raise SpecError."""

    family: str
    """One of FAMILIES."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of one head; num_heads * head_dim may differ from hidden_size."""
    intermediate_size: int
    """Width of a dense MLP (layers outside moe_layers)."""
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """None for plain rope, else {"rope_type": "linear" | "llama3" | "yarn", ...} with the keys of ROPE_KEYS."""
    max_positions: int
    tied: bool
    """The head is the embedding; there is no `lm_head.weight`."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    """RMSNorm over each head of q and k, before rope (Qwen3)."""
    num_experts: int = 0
    top_k: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    """0 for no shared expert."""
    norm_topk_prob: bool = False
    """Divide the chosen router probabilities by their sum."""
    moe_layers: frozenset[int] = frozenset()
    """Indices of the layers whose MLP is a mixture of experts."""

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The spec of a Hugging Face config of transformers 4 or 5.

        config  the dict of a `config.json`
        Raises SpecError for an unsupported model_type or feature, and for sizes that cannot be.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise SpecError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
        _refuse_unsupported(config)
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        head_dim = config.get("head_dim", 128 if family == "qwen3" else None)  # that config class says 128
        if head_dim is None and hidden % heads:
            raise SpecError(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}; set head_dim")
        attention_bias = bool(config.get("attention_bias", False))
        num_layers = _size(config, "num_hidden_layers", most=MOST_LAYERS)
        max_positions = _size(config, "max_position_embeddings", 2048)
        rope_theta, rope_scaling = _rope(config, max_positions)
        return cls(
            family=family,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=hidden // heads if head_dim is None else _size({"head_dim": head_dim}, "head_dim"),
            intermediate_size=_size(config, "intermediate_size"),
            rms_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_positions=max_positions,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias={"qwen2": True, "qwen2_moe": bool(config.get("qkv_bias", True))}.get(family, attention_bias),
            o_bias=attention_bias and family not in ("qwen2", "qwen2_moe"),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            **(_experts(config, num_layers) if family.endswith("_moe") else {}),
        )

    def to_hf_config(self) -> dict[str, Any]:
        """A `config.json` that transformers 4 and 5 read back as this model; `from_hf_config` inverts it."""
        config: dict[str, Any] = {
            "model_type": self.family,
            "architectures": [_ARCHITECTURES[self.family]],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }
        if self.family in ("llama", "qwen3", "qwen3_moe"):
            config["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            config["mlp_bias"] = False
        else:
            config["use_sliding_window"] = False
        if self.family.endswith("_moe"):
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": 1,
                "mlp_only_layers": sorted(set(range(self.num_layers)) - self.moe_layers),
            }
        if self.family == "qwen2_moe":
            config["shared_expert_intermediate_size"] = self.shared_expert_intermediate_size
            config["qkv_bias"] = self.qkv_bias
        return config


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of the model, in forward order.

    Canonical names are the unfused Hugging Face names, one per expert. A tied model has no `lm_head.weight`.
    """
    hidden, q_rows, kv_rows = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            shapes[f"{at}.self_attn.{name}.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{at}.self_attn.{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, q_rows)
        if spec.o_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if layer in spec.moe_layers:
            shapes[f"{at}.mlp.gate.weight"] = (spec.num_experts, hidden)
            for expert in range(spec.num_experts):
                shapes |= _mlp_shapes(f"{at}.mlp.experts.{expert}", hidden, spec.moe_intermediate_size)
            if spec.shared_expert_intermediate_size:
                shapes |= _mlp_shapes(f"{at}.mlp.shared_expert", hidden, spec.shared_expert_intermediate_size)
                shapes[f"{at}.mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            shapes |= _mlp_shapes(f"{at}.mlp", hidden, spec.intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _mlp_shapes(at: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (width, hidden),
        f"{at}.up_proj.weight": (width, hidden),
        f"{at}.down_proj.weight": (hidden, width),
    }


def _size(config: Mapping[str, Any], key: str, default: int | None = None, *, most: int = 2**62) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise SpecError(f"the model config has no {key}; it must be an integer of at least 1")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{key} is {value!r}; it must be an integer of at least 1")
    if value > most:
        raise SpecError(f"{key} is {value}; it must be at most {most}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{key} is {value!r}; it must be a number")
    return float(value)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """SpecError for what would change the numbers and the decoder does not do."""
    listed = config.get("layer_types") or ()
    others = [kind for kind in listed if kind != "full_attention"] if isinstance(listed, list | tuple) else [listed]
    if config.get("use_sliding_window") or others:
        raise SpecError(
            f"sliding-window attention is not supported (use_sliding_window {config.get('use_sliding_window')!r}, "
            f"layer_types {str(others)[:80]}); only full attention is"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise SpecError(f"hidden_act {config['hidden_act']!r} is not supported; only silu is")
    if config.get("mlp_bias"):
        raise SpecError("mlp_bias true is not supported; MLPs have no bias here")
    if config.get("attention_dropout"):
        raise SpecError(f"attention_dropout {config['attention_dropout']!r} is not supported; it must be 0")
    if config.get("quantization_config"):
        raise SpecError("the checkpoint is quantized already (quantization_config); convert it to BF16 first")


def _rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise SpecError(f"rope_scaling is {scaling!r}; it must be an object or null")
    given = dict(scaling)
    theta = _number({"rope_theta": given.pop("rope_theta", None) or config.get("rope_theta")}, "rope_theta", 10000.0)
    old_type = given.pop("type", "default")
    rope_type = given.pop("rope_type", old_type)
    if (given.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise SpecError("partial_rotary_factor other than 1 is not supported; rope turns whole heads here")
    if rope_type == "default":
        return theta, None
    if rope_type not in ROPE_KEYS:
        raise SpecError(f"rope type {rope_type!r} is not supported; supported: default, {', '.join(ROPE_KEYS)}")
    required, optional = ROPE_KEYS[rope_type]
    if "original_max_position_embeddings" in required:
        outside = config.get("original_max_position_embeddings", max_positions)
        given.setdefault("original_max_position_embeddings", outside)
    missing, extra = set(required) - given.keys(), given.keys() - set(required) - set(optional)
    if missing or extra:
        raise SpecError(
            f"rope type {rope_type!r}: missing {sorted(missing)}, unknown {sorted(extra)}; "
            f"needs {list(required)}, may have {list(optional)}"
        )
    if _number(given, "factor", 1.0) < 1.0:
        raise SpecError(f"rope factor {given['factor']!r} must be at least 1")
    return theta, {"rope_type": rope_type} | {k: v for k, v in given.items() if v is not None}


def _experts(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Fields of a mixture of experts; layer i is one unless listed in mlp_only_layers or skipped by the sparse step."""
    count_key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    step, first_dense = _size(config, "decoder_sparse_step", 1), config.get("first_k_dense_replace") or 0
    if type(first_dense) is not int or not 0 <= first_dense <= num_layers:
        raise SpecError(f"first_k_dense_replace is {first_dense!r}; it must be a number of layers, 0 to {num_layers}")
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise SpecError(f"mlp_only_layers is {listed!r}; it must be a list of layer numbers")
    dense = set(listed) | set(range(first_dense))
    stray = sorted(layer for layer in dense if not 0 <= layer < num_layers)
    if stray:
        raise SpecError(f"mlp_only_layers names layers {stray}; the model has layers 0 to {num_layers - 1}")
    shared = config["model_type"] == "qwen2_moe"
    return {
        "num_experts": _size(config, count_key, most=MOST_EXPERTS // num_layers),
        "top_k": _size(config, "num_experts_per_tok"),
        "moe_intermediate_size": _size(config, "moe_intermediate_size"),
        "shared_expert_intermediate_size": _size(config, "shared_expert_intermediate_size") if shared else 0,
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "moe_layers": frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    }


def _check(spec: ModelSpec) -> None:
    if spec.family not in FAMILIES:
        raise SpecError(f"family {spec.family!r} is not supported; supported: {', '.join(FAMILIES)}")
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    for name in (*sizes, "max_positions"):
        if getattr(spec, name) < 1:
            raise SpecError(f"{name} is {getattr(spec, name)}; it must be at least 1")
    if spec.num_heads % spec.num_kv_heads:
        raise SpecError(
            f"num_attention_heads {spec.num_heads} is not divisible by num_key_value_heads {spec.num_kv_heads}"
        )
    if spec.head_dim % 2:
        raise SpecError(f"head_dim {spec.head_dim} is odd; rope turns pairs and needs an even size")
    if not 0 < spec.rms_eps < math.inf or not 0 < spec.rope_theta < math.inf:
        raise SpecError(f"rms_norm_eps {spec.rms_eps} and rope_theta {spec.rope_theta} must be finite and above 0")
    if spec.moe_layers:
        if not 1 <= spec.top_k <= spec.num_experts:
            raise SpecError(f"num_experts_per_tok {spec.top_k} must be between 1 and num_experts {spec.num_experts}")
        if spec.moe_intermediate_size < 1:
            raise SpecError(f"moe_intermediate_size is {spec.moe_intermediate_size}; it must be at least 1")
        if not spec.moe_layers <= set(range(spec.num_layers)):
            raise SpecError(f"MoE layers {sorted(spec.moe_layers)}; the model has layers 0 to {spec.num_layers - 1}")
