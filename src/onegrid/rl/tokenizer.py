"""The tokenizer of a checkpoint folder: single characters for the built-in task, or what came with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from onegrid.errors import TaskError
from onegrid.rl.characters import CharacterTokenizer

CHARACTERS = "characters.json"
TOKENIZER = "tokenizer.json"


class FileTokenizer:
    """A tokenizer.json of the Hugging Face kind, read by their library (extra `hf`)."""

    def __init__(self, path: Path) -> None:
        """Reads one file. TaskError without the library, or if it cannot be read."""
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise TaskError(f'{path} needs the library tokenizers: pip install "onegrid[hf]" ({error})') from error
        self.path = path
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise TaskError(f"cannot read a tokenizer from {path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special ids are left out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """The file as it was read."""
        path.write_bytes(self.path.read_bytes())


def load_tokenizer(folder: Path) -> CharacterTokenizer | FileTokenizer:
    """The tokenizer of a checkpoint folder. TaskError if it has none."""
    if (folder / CHARACTERS).exists():
        return CharacterTokenizer.load(folder / CHARACTERS)
    if (folder / TOKENIZER).exists():
        return FileTokenizer(folder / TOKENIZER)
    raise TaskError(f"{folder} has neither {TOKENIZER} nor {CHARACTERS}; a checkpoint needs its tokenizer")


def save_tokenizer(tokenizer: CharacterTokenizer | FileTokenizer, folder: Path) -> None:
    """Writes it where `load_tokenizer` finds it."""
    tokenizer.save(folder / (CHARACTERS if isinstance(tokenizer, CharacterTokenizer) else TOKENIZER))


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer: those of generation_config.json, else of config.json; empty if neither names any."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            try:
                ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise TaskError(f"cannot read {path}: {error}") from error
            if ids is not None:
                listed = tuple(ids) if isinstance(ids, list) else (ids,)
                if not all(type(i) is int for i in listed):
                    raise TaskError(f"eos_token_id in {path} is {ids!r}; it must be a token id or a list of them")
                return listed
    return ()
