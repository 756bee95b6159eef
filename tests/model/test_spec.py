"""A spec says what transformers says of the same config, and refuses what cannot be."""

from __future__ import annotations

import pytest

from onegrid.errors import SpecError
from onegrid.model.spec import FAMILIES, ModelSpec, tensor_shapes
from onegrid.model.weights import unpack_experts
from tests.model.tiny import config_of, transformers_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_shapes_are_those_of_transformers(family, tied):
    model = transformers_model(family, tie_word_embeddings=tied)
    spec = ModelSpec.from_hf_config(model.config.to_dict())
    theirs = {n: tuple(t.shape) for n, t in unpack_experts(model.state_dict()).items()}
    if tied:
        theirs.pop("lm_head.weight")
    assert tensor_shapes(spec) == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_reads_back_from_its_config_and_transformers_reads_the_same(family):
    from transformers import AutoConfig

    config = config_of(family, rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=5e5)
    spec = ModelSpec.from_hf_config(config)
    assert spec.rope_scaling == {"rope_type": "linear", "factor": 2.0} and spec.rope_theta == 5e5
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec
    assert ModelSpec.from_hf_config(AutoConfig.for_model(**spec.to_hf_config()).to_dict()) == spec
    assert hash(spec) == hash(ModelSpec.from_hf_config(config))


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    ],
    ids=["llama3", "yarn"],
)
def test_rope_scaling_reads_alike_in_the_spelling_of_transformers_4_and_5(scaling):
    kind = "llama3" if "low_freq_factor" in scaling else "yarn"
    four = config_of("llama", rope_theta=5e5, rope_scaling={"type": kind, **scaling})
    five = config_of("llama", rope_parameters={"rope_type": kind, "rope_theta": 5e5, **scaling})
    assert ModelSpec.from_hf_config(four) == ModelSpec.from_hf_config(five)
    assert ModelSpec.from_hf_config(four).rope_scaling == {"rope_type": kind, **scaling}
    plain = config_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert ModelSpec.from_hf_config(plain).rope_scaling is None


def test_which_layers_are_experts_follows_the_config():
    def layers(**extra):
        return set(ModelSpec.from_hf_config(config_of("qwen3_moe", num_hidden_layers=4, **extra)).moe_layers)

    assert layers(mlp_only_layers=[]) == {0, 1, 2, 3}
    assert layers(mlp_only_layers=[0, 2]) == {1, 3}
    assert layers(mlp_only_layers=[], decoder_sparse_step=2) == {1, 3}
    assert layers(mlp_only_layers=[], first_k_dense_replace=3) == {3}
    five = config_of("qwen3_moe")
    five["num_local_experts"] = five.pop("num_experts")
    assert ModelSpec.from_hf_config(five) == ModelSpec.from_hf_config(config_of("qwen3_moe"))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"model_type": "mamba"}, "'mamba' is not supported; supported: llama, qwen2"),
        (
            "llama",
            {"num_attention_heads": 3, "head_dim": None},
            "hidden_size 32 is not divisible by num_attention_heads 3",
        ),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ("llama", {"head_dim": 7}, "head_dim 7 is odd"),
        ("llama", {"hidden_size": 0}, "hidden_size is 0; it must be an integer of at least 1"),
        ("llama", {"vocab_size": None}, "the model config has no vocab_size"),
        ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "missing .*high_freq_factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 1}}, r"unknown \['alpha'\]"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen2", {"use_sliding_window": True}, "sliding-window attention is not supported"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 must be between 1 and num_experts 4"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers names layers \[2\]"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantized already"),
    ],
)
def test_impossible_or_unsupported_configs_are_errors_that_name_the_value(family, change, message):
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_hf_config(config_of(family, **change))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; it must be a number"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_scaling": 3}, "rope_scaling is 3; it must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers is .*; it must be a list of layer numbers"),
    ],
)
def test_entries_of_the_wrong_type_are_named(changes, said):
    with pytest.raises(SpecError, match=said):
        ModelSpec.from_hf_config(config_of("qwen3_moe") | changes)
