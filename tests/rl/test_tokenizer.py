"""A checkpoint's tokenizer comes along, whichever kind it is."""

from __future__ import annotations

import json

import pytest

from onegrid.errors import TaskError
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.tokenizer import load_tokenizer, save_tokenizer, stop_tokens


def test_the_tokenizer_of_characters_reads_back(tmp_path):
    save_tokenizer(CharacterTokenizer("abc "), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("cab a")) == "cab a"


def test_a_tokenizer_file_of_hugging_face_reads_back_and_adds_nothing(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "<s>": 1, "12": 2, "+": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("12 + 12") == [2, 3, 2]
    assert tokenizer.decode([1, 2, 3]) == "12 +"
    assert tokenizer.vocab_size == 4
    (tmp_path / "copy").mkdir()
    save_tokenizer(tokenizer, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").encode("+") == [3]


def test_a_folder_without_a_usable_tokenizer_is_an_error_with_its_name(tmp_path):
    with pytest.raises(TaskError, match=tmp_path.name):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TaskError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_stop_tokens_come_from_the_generation_settings_first(tmp_path):
    assert stop_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_tokens(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert stop_tokens(tmp_path) == (5, 7)


@pytest.mark.parametrize("ids", ["x", [2, "3"], 1.5, True])
def test_stop_tokens_that_are_no_ids_are_an_error_with_the_value(tmp_path, ids):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(TaskError, match=r"eos_token_id in .*config\.json is .* it must be a token id or a list"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize("content", [{"kind": "characters"}, {"kind": "characters", "characters": 3}])
def test_a_tokenizer_of_characters_without_text_is_an_error(tmp_path, content):
    (tmp_path / "characters.json").write_text(json.dumps(content))
    with pytest.raises(TaskError, match=r'"characters" is .*; it must be text'):
        load_tokenizer(tmp_path)
