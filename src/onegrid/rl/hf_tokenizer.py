"""Chat templates of Hugging Face tokenizers. The only file that imports transformers for text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onegrid.errors import TaskError

Chat = Sequence[dict[str, str]]


class ChatTemplate:
    """Turns a chat into the text that a model was trained to continue."""

    def __init__(self, folder: Path) -> None:
        """folder holds tokenizer.json and tokenizer_config.json.

        Raises TaskError without transformers (extra `hf`), or if the folder has no tokenizer or no chat template.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise TaskError(
                f'the chat template of {folder} needs transformers: pip install "onegrid[hf]", or set chat = "plain" '
                f"({error})"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises of many kinds for a folder that it cannot use
            raise TaskError(f"cannot read the tokenizer of {folder}: {type(error).__name__}: {error}") from error
        if not self._tokenizer.chat_template:
            raise TaskError(f'the tokenizer of {folder} has no chat template; set chat = "plain" to do without')

    def __call__(self, chat: Chat) -> str:
        """The chat as text, up to where the model answers. TaskError if the template refuses it."""
        try:
            return str(self._tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates are programs, and raise what they like
            raise TaskError(f"the chat template does not take this chat: {error}") from error


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer folder brings a chat template, without importing anything."""
    config = folder / "tokenizer_config.json"
    inside = config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")
    return inside or (folder / "chat_template.jinja").exists()
