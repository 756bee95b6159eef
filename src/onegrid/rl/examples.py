"""From a row of a data file to an example: prompt, label and the rest, found by keys and checked.

verl's columns are the default: data_source, prompt (a chat), reward_model.ground_truth, extra_info. GSM8K as published
has question and answer. Other files name their keys, as in Miles and slime.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.rows import MISSING, Row, RowError, no_column, too_big, value_at

LAYOUTS = {
    "verl": {"input_key": "prompt", "label_key": "reward_model.ground_truth", "metadata_key": "extra_info"},
    "gsm8k": {"input_key": "question", "label_key": "answer", "metadata_key": ""},
}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Files to learn from, and what to do with rows that are not as they should be."""

    files: tuple[str, ...] = ()
    """Parquet or JSONL; relative names start at the configuration file."""
    eval_files: tuple[str, ...] = ()
    """Held-out problems, which are then never trained on. Without any, one problem in five of `files` is held out."""
    layout: Literal["auto", "verl", "gsm8k"] = "auto"
    """Which columns hold what. "auto" takes the one whose columns the first row has."""
    input_key: str = ""
    """In place of the layout's: prompt, as text or as a chat. With dots for a field inside a column."""
    label_key: str = ""
    metadata_key: str = ""
    id_key: str = ""
    """Names a row; by default the metadata's "index", where it has one."""
    template: str = "{question}"
    """Put around a prompt that is text; {question} is replaced by it."""
    chat: Literal["auto", "template", "plain"] = "auto"
    """"template" makes every prompt a chat of the tokenizer, "plain" joins the contents by newlines; "auto" uses the
    tokenizer's template if it has one."""
    max_prompt_tokens: int = 1024
    on_long_prompt: Literal["skip", "fail"] = "skip"
    on_duplicate: Literal["skip", "fail"] = "skip"
    """The same id with the same prompt again. With another prompt it is a bad row."""
    on_bad_row: Literal["skip", "fail"] = "fail"
    max_row_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ConfigError(f"template is {self.template!r}; it must contain {{question}}")
        if self.max_prompt_tokens < 1 or self.max_row_bytes < 1:
            raise ConfigError(
                f"max_prompt_tokens {self.max_prompt_tokens} and max_row_bytes {self.max_row_bytes} must be at least 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One problem, as the data has it and as the model sees it."""

    prompt: str | list[dict[str, str]]
    text: str
    tokens: tuple[int, ...]
    label: Any
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)


class Reader:
    """Makes examples of the rows of one set of files. Remembers ids, and the type of the first label."""

    def __init__(
        self,
        config: DataConfig,
        *,
        encode: Callable[[str], tuple[int, ...]],
        chat: Callable[[list[dict[str, str]]], str] | None,
    ) -> None:
        """encode turns the text of a prompt into tokens; chat renders a chat, None joins its contents."""
        self._config, self._encode, self._chat = config, encode, chat
        self._keys: dict[str, str] | None = None
        self._label_type = ""
        self._seen: dict[tuple[str, str, str], int] = {}

    def example(self, row: Row) -> Example | None:
        """The example of a row; None for a duplicate of an earlier one. RowError for a row that is not usable."""
        if row.fault:
            raise row.fault
        keys = self._keys_of(row)
        prompt = self._prompt(row, keys["input_key"])
        label = self._label(row, keys["label_key"])
        metadata = value_at(row.values, keys["metadata_key"]) if keys["metadata_key"] else MISSING
        if metadata is MISSING and self._config.metadata_key:
            raise no_column(row, keys["metadata_key"], setting="metadata_key")
        extra_info = dict(metadata) if isinstance(metadata, Mapping) else {}
        source = str(row.values.get("data_source") or row.file.stem)
        if self._again(row, source, extra_info, prompt):
            return None
        text = self._text(row, prompt)
        tokens = self._tokens(row, text)
        top = keys["input_key"].partition(".")[0]
        return Example(
            prompt=prompt,
            text=text,
            tokens=tokens,
            label=label,
            data_source=source,
            extra_info=extra_info,
            columns={name: value for name, value in row.values.items() if name not in (keys["input_key"], top)},
        )

    def _keys_of(self, row: Row) -> dict[str, str]:
        if self._keys is None:
            config, layout = self._config, self._config.layout
            if layout == "auto":
                fits = [
                    name for name, keys in LAYOUTS.items() if value_at(row.values, keys["input_key"]) is not MISSING
                ]
                layout = fits[0] if fits else "verl"  # type: ignore[assignment]
            given = {name: getattr(config, name) for name in LAYOUTS["verl"]}
            self._keys = LAYOUTS[layout] | {name: key for name, key in given.items() if key}
        return self._keys

    def _prompt(self, row: Row, key: str) -> str | list[dict[str, str]]:
        value = value_at(row.values, key)
        if value is MISSING:
            raise no_column(row, key, setting="input_key")
        if isinstance(value, str):
            return self._config.template.replace("{question}", value)
        if not isinstance(value, list) or not value:
            raise RowError(f"{row.place}: {key} is {_shown(value)}, not text or a chat", kind="bad_prompt")
        for message in value:
            if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
                raise RowError(
                    f'{row.place}: {key} has {_shown(message)}; a message is {{"role", "content"}}, both text',
                    kind="bad_prompt",
                )
            if message.get("role") not in ROLES:
                raise RowError(
                    f"{row.place}: {key} has the role {message.get('role')!r}; known are {', '.join(ROLES)}",
                    kind="bad_prompt",
                )
        return [{"role": m["role"], "content": m["content"]} for m in value]

    def _label(self, row: Row, key: str) -> Any:
        value = value_at(row.values, key)
        if value is MISSING:
            raise no_column(row, key, setting="label_key")
        kind = _type_of(value)
        empty = value is None or (isinstance(value, str) and not value.strip())
        if empty or (isinstance(value, float) and not math.isfinite(value)):
            found = "empty" if empty else value  # NaN is how pandas writes nothing
            raise RowError(f"{row.place}: {key} is {found}; every problem needs a label", kind="no_label")
        self._label_type = self._label_type or kind
        if kind != self._label_type:
            raise RowError(
                f"{row.place}: {key} is {_shown(value)}, a {kind}, where the first label was a {self._label_type}; "
                "labels must be of one type",
                kind="label_type",
            )
        return value

    def _again(self, row: Row, source: str, extra_info: Mapping[str, Any], prompt: Any) -> bool:
        """Whether this very example came before."""
        key = self._config.id_key
        name = value_at(row.values, key) if key else extra_info.get("index", MISSING)
        if name is MISSING or name is None:
            if key:
                raise no_column(row, key, setting="id_key")
            return False
        place = (source, str(extra_info.get("split", "")), str(name))
        digest = hash(json.dumps(prompt))
        if place not in self._seen:
            self._seen[place] = digest
            return False
        if self._seen[place] != digest:
            raise RowError(f"{row.place}: the id {name!r} was given to another prompt before", kind="duplicate_id")
        if self._config.on_duplicate == "fail":
            raise TaskError(f'{row.place}: the id {name!r} came before; set on_duplicate = "skip" to leave it out')
        return True

    def _text(self, row: Row, prompt: str | list[dict[str, str]]) -> str:
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = self._chat(chat) if self._chat else "\n".join(message["content"] for message in chat)
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RowError(f"{row.place} is not UTF-8: {error}", kind="bad_utf8") from error
        except TaskError as error:
            raise RowError(f"{row.place}: {error}", kind="bad_prompt") from error
        if num_bytes > self._config.max_row_bytes:
            raise too_big(row.file, row.number, num_bytes, self._config.max_row_bytes)
        return text

    def _tokens(self, row: Row, text: str) -> tuple[int, ...]:
        try:
            tokens = self._encode(text)
        except TaskError as error:
            raise RowError(f"{row.place}: {error}", kind="no_tokens") from error
        limit = self._config.max_prompt_tokens
        if len(tokens) > limit:
            raise RowError(
                f"{row.place}: the prompt has {len(tokens)} tokens, max_prompt_tokens is {limit}", kind="too_long"
            )
        return tokens


def _type_of(value: Any) -> str:
    if value is None:
        return "nothing"
    kinds = ((bool, "truth value"), (str, "text"), (int | float, "number"), (list, "list"), (Mapping, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
