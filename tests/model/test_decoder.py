"""The decoder against transformers on tiny random models of each family, and its rows against each other."""

from __future__ import annotations

import pytest
import torch

from onegrid.model.decoder import Rows, decode_rows, head_name
from onegrid.model.live import LiveWeights
from onegrid.model.publish import publish
from onegrid.model.rope import rope_table
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack
from onegrid.ops.attention import attention
from onegrid.ops.logprob import logits
from onegrid.recipe import PRESETS, resolve
from tests.bytes import assert_same_bytes

SMALL = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": dict(model_type="llama", tie_word_embeddings=False),
    "llama_bias": dict(model_type="llama", attention_bias=True, tie_word_embeddings=True),
    "llama3_rope": dict(model_type="llama", rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64}),
    "linear_rope": dict(model_type="llama", rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=32, tie_word_embeddings=True),
    "qwen3_yarn": dict(model_type="qwen3", head_dim=32, rope_parameters=YARN),
    "qwen2_moe": dict(model_type="qwen2_moe", shared_expert_intermediate_size=80, **EXPERTS),
    "qwen3_moe": dict(model_type="qwen3_moe", head_dim=32, norm_topk_prob=True, mlp_only_layers=[0], **EXPERTS),
}


def live_weights(spec: ModelSpec, tensors: dict[str, torch.Tensor], preset: str) -> LiveWeights:
    plan = resolve(PRESETS[preset], spec.to_hf_config(), tensor_shapes(spec))
    live = LiveWeights(spec, plan, side="learner")
    values = {
        key: torch.stack([tensors[n] for n in names]) if is_stack(key) else tensors[names[0]]
        for key, names in live.keys.items()
    }
    for key, value in publish({k: v.bfloat16() for k, v in values.items()}, live.keys, plan, side="learner").items():
        live.write(key, value)
    live.derive()
    return live


def whole_sequence(spec: ModelSpec, live: LiveWeights, tokens_T: torch.Tensor) -> torch.Tensor:
    length = len(tokens_T)
    rows = Rows(tokens_N=tokens_T, positions_N=torch.arange(length), mask_N=torch.ones(length, dtype=torch.bool))
    start = torch.zeros(1, dtype=torch.int64)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q[None], k[None], v[None], start)[0]

    hidden = decode_rows(spec, live, rows, attend, rope=rope_table(spec, spec.max_positions))
    return logits(hidden, live.tensor(head_name(spec)))


def hugging_face(config: dict, dtype: torch.dtype):
    transformers = pytest.importorskip("transformers")
    settings = SMALL | config
    model_type = settings.pop("model_type")
    hf = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.1 + (1.0 if "norm" in name else 0.0))
            tensor.copy_(tensor.bfloat16().float())
    return model.to(dtype), hf


def canonical(model, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Canonical tensors of a transformers model, whichever way it keeps its experts."""
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    out = {}
    for name in tensor_shapes(spec):
        if name in state:
            out[name] = state[name]
            continue
        head, _, rest = name.partition(".experts.")
        expert, projection = rest.split(".")[:2]
        if projection == "down_proj":
            out[name] = state[f"{head}.experts.down_proj"][int(expert)]
        else:
            both = state[f"{head}.experts.gate_up_proj"][int(expert)]
            out[name] = both.chunk(2)[projection == "up_proj"]
    return out


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_match_transformers(family):
    model, hf = hugging_face(CONFIGS[family], torch.float32)
    spec = ModelSpec.from_hf_config(hf.to_dict())
    live = live_weights(spec, canonical(model, spec), "bf16")
    tokens = torch.randint(0, spec.vocab_size, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        low = model.to(torch.bfloat16)(tokens[None]).logits[0].float()
    have = whole_sequence(spec, live, tokens)
    # Against FP32 arithmetic only our BF16 activations differ: about 9 roundings a layer, each at most 2^-9 of its
    # number, independent, on a residual stream that keeps their size; 3 standard errors of 9 x 2 layers and the head.
    # A rounding that tips a near tie of two experts changes a row by more, so the bound is for the median row, and
    # transformers in BF16, which rounds more often and tips the same ties, must not be closer than we are.
    error_T, low_T = ((t - want).norm(dim=-1) / want.norm(dim=-1) for t in (have, low))
    assert error_T.median() < 3 * (9 * spec.num_layers + 1) ** 0.5 * 2**-9
    assert error_T.mean() < 1.5 * low_T.mean()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("preset", ["bf16", "mxfp8", "nvfp4_all", "fp8_row", "fp8_block", "mxfp4"])
def test_a_prefix_alone_gives_the_bytes_it_gives_inside(family, preset):
    model, hf = hugging_face(CONFIGS[family], torch.float32)
    spec = ModelSpec.from_hf_config(hf.to_dict())
    live = live_weights(spec, canonical(model, spec), preset)
    tokens = torch.randint(0, spec.vocab_size, (70,), generator=torch.Generator().manual_seed(2))
    whole = whole_sequence(spec, live, tokens)
    for length in (1, 2, 31, 33, 64):
        assert_same_bytes(whole_sequence(spec, live, tokens[:length]), whole[:length])
