"""A tokenizer of single characters for arithmetic: small enough to read, and encode(decode(ids)) == ids holds for
every id.

Real models bring their own tokenizer; this one lets the built-in task run with nothing downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from onegrid.errors import TaskError

ARITHMETIC = "0123456789+-*= "


class CharacterTokenizer:
    """Ids 0, 1, 2 are pad, begin and end of sequence; the characters follow in the order given."""

    pad_token_id = 0
    bos_token_id = 1
    eos_token_id = 2

    def __init__(self, characters: str = ARITHMETIC) -> None:
        if not characters or len(set(characters)) != len(characters):
            raise TaskError(f"characters are {characters!r}; a tokenizer needs at least one, each only once")
        self.characters = characters
        self._ids = {character: i + 3 for i, character in enumerate(characters)}

    @property
    def vocab_size(self) -> int:
        """Number of ids, the three special ones included."""
        return len(self.characters) + 3

    def encode(self, text: str) -> list[int]:
        """Ids of the characters, with no special ids added. Raises TaskError for a character it does not have."""
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise TaskError(f"the text {text!r} has {unknown}, but this tokenizer knows only {self.characters!r}")
        return [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids without the special ones. Ids past the vocabulary (a padded head has some) show as U+FFFD."""
        return "".join(self._character(int(i)) for i in ids if int(i) > 2)

    def save(self, path: Path) -> None:
        """Writes one small JSON file."""
        path.write_text(json.dumps({"kind": "characters", "characters": self.characters}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CharacterTokenizer:
        """Reads what `save` wrote. Raises TaskError for anything else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TaskError(f"cannot read a tokenizer from {path}: {error}") from error
        if not isinstance(content, dict) or content.get("kind") != "characters":
            raise TaskError(f'{path} holds no character tokenizer: its "kind" must be "characters"')
        if not isinstance(content.get("characters"), str):
            raise TaskError(f'{path}: "characters" is {content.get("characters")!r}; it must be text')
        return cls(content["characters"])

    def _character(self, i: int) -> str:
        return self.characters[i - 3] if i - 3 < len(self.characters) else "\N{REPLACEMENT CHARACTER}"
