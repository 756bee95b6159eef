"""The tokenizer of a GGUF file as the files of a Hugging Face folder.

GGUF names how text is cut before merging instead of saying it; a name that is not in the table is refused, because a
tokenizer that cuts differently gives other tokens and no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from onegrid.errors import CheckpointError, WeightsError

AT = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4
"""Token types that are never the result of merges."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CUTS = {
    "gpt-2": "words",
    "smollm": "digits",
    "starcoder": "digits",
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
}
"""tokenizer.ggml.pre -> "words" as GPT-2 cuts, "digits" the same after setting every digit apart, or a pattern."""


def tokenizer_files(fields: Mapping[str, Any], *, vocab_size: int, max_positions: int) -> dict[str, str]:
    """File name -> text of tokenizer.json, tokenizer_config.json and generation_config.json.

    fields  of the GGUF file, as plain values
    Raises WeightsError for a kind of tokenizer that is not byte-level BPE, an unknown way to cut, or more tokens than
    the embedding has rows; CheckpointError without the library (extra `gguf`).
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise WeightsError(f'the tokenizer is of the kind {kind!r}; only byte-level BPE ("gpt2") is translated')
    if pre not in CUTS:
        raise WeightsError(f"the tokenizer cuts text by {pre!r}; known are {', '.join(CUTS)}")
    tokens: list[str] = _listed(fields, "tokens", str)
    if len(tokens) > vocab_size:
        raise WeightsError(f"{len(tokens)} tokens, but the embedding has {vocab_size} rows")
    if len(set(tokens)) < len(tokens):
        raise WeightsError(f"{len(tokens)} tokens, of which {len(set(tokens))} differ; two ids cannot be one text")
    types: list[int] = _listed(fields, "token_type", int) if f"{AT}token_type" in fields else [1] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(f"{len(tokens)} tokens, but {len(types)} types of tokens")
    merges: list[str] = _listed(fields, "merges", str)
    known = set(tokens)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise WeightsError(f"the tokenizer merges {merge!r}, whose parts and whole are not all among its tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {name: _token_id(fields, key, len(tokens)) for name, key in names.items()}
    end_ids = sorted({i for key in ("eos", "eot", "eom") if (i := _token_id(fields, key, len(tokens))) is not None})
    template = fields.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise WeightsError(f"tokenizer.chat_template is {template!r}; it must be a text")
    first = tokens[special["bos"]] if fields.get(f"{AT}add_bos_token") is True and special["bos"] is not None else None
    text = _tokenizer_json(tokens, merges, types, pre=pre, bos=first)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    config |= {f"{name}_token": tokens[i] for name, i in special.items() if i is not None}
    if template:
        config["chat_template"] = template
    settings: dict[str, Any] = {f"{n}_token_id": int(i) for n, i in special.items() if n != "unk" and i is not None}
    if end_ids:
        settings["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(settings, indent=2) + "\n",
    }


def _listed(fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    found = fields.get(AT + key)
    if not isinstance(found, list) or not all(type(x) is kind for x in found):
        raise WeightsError(f"{AT}{key} is {str(found)[:60]!r}; it must be a list of {kind.__name__}")
    return found


def _token_id(fields: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    found = fields.get(f"{AT}{key}_token_id")
    if found is not None and (type(found) is not int or not 0 <= found < num_tokens):
        raise WeightsError(f"{AT}{key}_token_id is {str(found)[:60]!r}; the tokenizer has ids 0 to {num_tokens - 1}")
    return found


def _tokenizer_json(tokens: list[str], merges: list[str], types: list[int], *, pre: str, bos: str | None) -> str:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    except ImportError as error:
        raise CheckpointError(f'a tokenizer needs tokenizers: pip install "onegrid[gguf]" ({error})') from error
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=CUTS[pre] == LLAMA3))
    cut = CUTS[pre]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut == "words":
        tokenizer.pre_tokenizer = words
    elif cut == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    else:
        split = pre_tokenizers.Split(Regex(cut), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    if cut == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    )
    return tokenizer.to_str()
