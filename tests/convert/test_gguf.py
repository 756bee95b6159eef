"""GGUF files come in whole, on the right names and rows, with a tokenizer that cuts as the original did."""

from __future__ import annotations

import gguf
import pytest
import torch
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.convert.gguf import import_gguf
from onegrid.errors import NonFiniteError, SpecError, WeightsError
from onegrid.model.spec import ModelSpec
from onegrid.model.weights import load_weights
from onegrid.rl.hf_tokenizer import ChatTemplate, has_chat_template
from onegrid.rl.tokenizer import load_tokenizer, stop_tokens
from tests.bytes import assert_same_bytes
from tests.convert.gguf_files import Kind, tokens, weights_of, write_gguf

DENSE = {
    "model_type": "llama",
    "vocab_size": len(tokens()),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "llama": DENSE,
    "llama untied": DENSE | {"tie_word_embeddings": False},
    "qwen3": DENSE | {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": DENSE | {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True} | MOE,
    "qwen2_moe": DENSE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 32} | MOE,
}
SPEC = ModelSpec.from_hf_config(DENSE)


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_arrives_under_its_name_with_its_rows_in_place(tmp_path, model):
    spec = ModelSpec.from_hf_config(MODELS[model])
    weights = weights_of(spec)
    write_gguf(tmp_path / "a.gguf", spec, weights)
    made = import_gguf(tmp_path / "a.gguf", tmp_path / "out", max_shard_bytes=50_000)
    assert made.spec == spec
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = load_weights(tmp_path / "out", spec)
    for name, tensor in weights.items():
        assert_same_bytes(loaded[name], tensor.to(torch.bfloat16), name)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0])
def test_every_stored_format_is_decoded_and_rounded_once(tmp_path, kind):
    weights = weights_of(SPEC)
    write_gguf(tmp_path / "a.gguf", SPEC, weights, kind=kind)
    loaded = load_weights(import_gguf(tmp_path / "a.gguf", tmp_path / "out").folder, SPEC)
    name = "model.layers.1.mlp.down_proj.weight"
    exact = gguf.dequantize(gguf.quantize(weights[name].numpy(), kind), kind)
    assert_same_bytes(loaded[name], torch.from_numpy(exact).to(torch.bfloat16))


def test_transformers_reads_the_same_model_from_both(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC), kind=Kind.Q8_0)
    out = import_gguf(tmp_path / "a.gguf", tmp_path / "out").folder
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="a.gguf",
        quantization_config=GgufConfig(gguf_file="a.gguf", dequantize=True),
        dtype=torch.bfloat16,
    )
    ids = torch.tensor([[5, 17, 40, 99, 3]])
    with torch.no_grad():
        assert_same_bytes(ours(ids).logits, theirs(ids).logits)
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|im_end|>"


def test_the_tokenizer_cuts_digits_as_the_model_was_trained_to(tmp_path):
    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC))
    out = import_gguf(tmp_path / "a.gguf", tmp_path / "out").folder
    tokenizer = load_tokenizer(out)
    names = tokens()
    assert {"12", "Ġ1"} < set(names)
    assert [names[i] for i in tokenizer.encode("hello 12")] == ["hello", "Ġ", "1", "2"]
    assert [names[i] for i in tokenizer.encode("a  1")] == ["a", "ĠĠ", "1"]
    assert tokenizer.decode(tokenizer.encode("hello  é\n1")) == "hello  é\n1"
    assert stop_tokens(out) == (2,)
    assert has_chat_template(out)
    text = ChatTemplate(out)([{"role": "user", "content": "1+1"}])
    assert text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert [names[i] for i in tokenizer.encode(text)][:2] == ["<|im_start|>", "u"]


def test_other_cuts_are_known_by_name_or_refused(tmp_path):
    def pieces(pre, text):
        write_gguf(tmp_path / f"{pre}.gguf", SPEC, weights_of(SPEC), **{"tokenizer.ggml.pre": pre})
        ids = load_tokenizer(import_gguf(tmp_path / f"{pre}.gguf", tmp_path / pre).folder).encode(text)
        return [tokens()[i] for i in ids]

    assert pieces("gpt-2", "a 1") == ["a", "Ġ1"]
    assert pieces("llama-bpe", "a12") == ["a", "12"]
    assert pieces("qwen2", "a12") == ["a", "1", "2"]
    with pytest.raises(WeightsError, match="'strange'; known are gpt-2"):
        pieces("strange", "a")


def test_two_ends_of_an_answer_are_both_kept(tmp_path):
    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC), **{"tokenizer.ggml.eot_token_id": 1})
    assert stop_tokens(import_gguf(tmp_path / "a.gguf", tmp_path / "out").folder) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "only byte-level BPE"),
        ({"llama.block_count": 1}, "blk.1.* has no place"),
        ({"llama.attention.head_count_kv": 4}, "blk.0.attn_k.weight has shape"),
        ({"llama.context_length": None}, "no field llama.context_length"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotary embedding"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path, fields, message):
    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC), **fields)
    with pytest.raises((WeightsError, SpecError), match=message):
        import_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_a_missing_tensor_or_a_NaN_is_refused_by_name(tmp_path):
    weights = weights_of(SPEC)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    write_gguf(tmp_path / "a.gguf", SPEC, weights)
    with pytest.raises(NonFiniteError, match=r"blk\.1\.ffn_up\.weight .* has 1 NaN"):
        import_gguf(tmp_path / "a.gguf", tmp_path / "out")
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_gguf(tmp_path / "b.gguf", SPEC, weights)
    with pytest.raises(WeightsError, match=r"up_proj\.weight .* is missing"):
        import_gguf(tmp_path / "b.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_cut_or_no_gguf_is_refused(tmp_path):
    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC))
    whole = (tmp_path / "a.gguf").read_bytes()
    for name, content in [("cut", whole[: len(whole) // 2]), ("text", b"hello"), ("empty", b"")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=name):
            import_gguf(tmp_path / name, tmp_path / "out")
    with pytest.raises(WeightsError, match="cannot read"):
        import_gguf(tmp_path / "none", tmp_path / "out")


def test_the_command_says_what_it_made_and_never_overwrites(tmp_path):
    write_gguf(tmp_path / "a.gguf", SPEC, weights_of(SPEC), kind=Kind.Q8_0)
    arguments = ["import", str(tmp_path / "a.gguf"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "llama, 2 layers" in done.output and "Q8_0" in done.output
    with pytest.raises(WeightsError, match="is not empty"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
