"""Problems from parquet and JSONL files, in an order that (seed, step) alone decides.

The files are read once, row by row, into a file of Arrow that is mapped and not loaded: prompts are tokens already, so
that a step waits for nothing, and any row is at hand, so that the order can be shuffled over everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.custom import Item
from onegrid.rl.examples import DataConfig, Example, Reader
from onegrid.rl.hf_tokenizer import ChatTemplate, has_chat_template
from onegrid.rl.rows import RowError, read_rows
from onegrid.rl.scoring import Pending, Scoring, ScoringConfig
from onegrid.rl.tasks import ATTEMPT_STRIDE, Prompt, Tokenizer, encode_prompt, is_held_out

STORE_ROWS = 256
"""Rows of one record batch of the mapped file."""


class DatasetTask:
    """Problems of files, scored by the rewards of the configuration."""

    name = "dataset"

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        num_prompts: int,
        seed: int,
        scoring: ScoringConfig | None = None,
        bos_token_id: int | None = None,
    ) -> None:
        """Reads all files.

        num_prompts  problems a step
        Raises TaskError with file and row for what is wrong with the data, as the configuration has it, and for files
        that leave too few problems; ConfigError for a reward that cannot be imported.
        """
        if not config.files:
            raise ConfigError("task.data.files is empty; name at least one .parquet or .jsonl file")
        self.scoring = Scoring(scoring or ScoringConfig())
        self.counts: Counter[str] = Counter()
        """Rows by what became of them: "trained", "held_out", and what they were skipped for."""
        chat = _chat(config, tokenizer)

        def encode(text: str) -> tuple[int, ...]:
            return encode_prompt(text, tokenizer, bos_token_id=bos_token_id)

        self._trained, self._held_out = Store(), Store()
        eval_texts = set()
        if config.eval_files:
            for example in self._examples(config, config.eval_files, Reader(config, encode=encode, chat=chat)):
                self._held_out.add(example)
                eval_texts.add(example.text)
        for example in self._examples(config, config.files, Reader(config, encode=encode, chat=chat)):
            if example.text in eval_texts:
                self.counts["also in eval_files"] += 1
            elif not config.eval_files and is_held_out(example.text):
                self._held_out.add(example)
            else:
                self._trained.add(example)
        self._trained.seal()
        self._held_out.seal()
        self.digest = f"{self._trained.digest}:{self._held_out.digest}"
        """Identifies every problem and their order in the files."""
        self.counts |= {"trained": len(self._trained), "held_out": len(self._held_out)}
        if num_prompts > len(self._trained):
            raise TaskError(
                f"a step takes {num_prompts} prompts, but the files leave {len(self._trained)} to train on "
                f"({self.summary()}); name more files, or take fewer prompts a step"
            )
        self._order = Order(len(self._trained), seed=seed, num_prompts=num_prompts)

    def summary(self) -> str:
        """What became of the rows, in one line."""
        return ", ".join(f"{count} {what}" for what, count in self.counts.items())

    def prompts(self, step: int, attempt: int = 0) -> list[Prompt]:
        """The training problems of a step, counted from 1."""
        first = (step - 1) * self._order.num_prompts + attempt * ATTEMPT_STRIDE
        rows = self._order.rows(step, attempt)
        return [_prompt(first + i, self._trained[row]) for i, row in enumerate(rows)]

    def held_out(self, n: int) -> list[Prompt]:
        """The first n held-out problems, in the order of the files. TaskError if there are fewer."""
        if n > len(self._held_out):
            raise TaskError(
                f"{n} held-out problems were asked for, the files have {len(self._held_out)} ({self.summary()}); "
                "lower eval.num_problems or name more eval_files"
            )
        return [_prompt(i, self._held_out[i]) for i in range(n)]

    def score(self, prompt: Prompt, text: str) -> float | None:
        """The weighted rewards of one completion; None if it cannot be scored."""
        return self.submit([(prompt, text)]).verdicts()[0].reward

    def submit(self, answered: Sequence[tuple[Prompt, str]]) -> Pending:
        """Begin to score completions of one prompt; the pool goes on while the caller does something else."""
        return self.scoring.submit([_item(prompt, text) for prompt, text in answered])

    def close(self) -> None:
        """End the processes that score."""
        self.scoring.close()

    def _examples(self, config: DataConfig, files: Iterable[str], reader: Reader) -> Iterator[Example]:
        found, first_fault = 0, None
        for name in files:
            for row in read_rows(Path(name), max_row_bytes=config.max_row_bytes):
                try:
                    example = reader.example(row)
                except RowError as error:
                    if self._refuses(config, error):
                        raise
                    self.counts[error.kind] += 1
                    first_fault = first_fault or error
                    continue
                if example is None:
                    self.counts["duplicate"] += 1
                    continue
                found += 1
                yield example
        if not found:
            raise TaskError(f"no row of {', '.join(files)} is usable ({self.summary()}); the first: {first_fault}")

    @staticmethod
    def _refuses(config: DataConfig, error: RowError) -> bool:
        return (config.on_long_prompt if error.kind == "too_long" else config.on_bad_row) == "fail"


class Order:
    """Which rows a step takes: every epoch is one shuffle of all rows, and steps run across epochs without a gap.

    Nothing is counted along, so that a resumed run, at any step and any number of times, sees what it would have seen.
    """

    def __init__(self, num_rows: int, *, seed: int, num_prompts: int) -> None:
        self.num_rows, self.num_prompts, self._seed = num_rows, num_prompts, seed
        self._last: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def rows(self, step: int, attempt: int = 0) -> list[int]:
        """Row numbers of a step, counted from 1. A redraw takes rows from elsewhere in the same epochs.

        Raises TaskError for a step below 1.
        """
        if step < 1:
            raise TaskError(f"step {step} was asked for; the first step is 1")
        start = (step - 1) * self.num_prompts
        shift = attempt * max(self.num_prompts, round(self.num_rows * 0.618))
        found = []
        for position in range(start, start + self.num_prompts):
            epoch, place = divmod(position, self.num_rows)
            found.append(int(self._shuffle(epoch)[(place + shift) % self.num_rows]))
        return found

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        if self._last[0] != epoch:
            digest = hashlib.blake2b(f"{self._seed}:{epoch}".encode(), digest_size=16, person=b"data-order").digest()
            raw_N = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(self.num_rows)  # a fixed stream
            self._last = (epoch, np.argsort(raw_N, kind="stable"))
        return self._last[1]


class Store:
    """Examples in a temporary file that is mapped into memory, each at hand by its number."""

    def __init__(self) -> None:
        import pyarrow as pa

        self._schema = pa.schema([("tokens", pa.list_(pa.int32())), ("json", pa.string())])
        descriptor, self._path = tempfile.mkstemp(prefix="onegrid-data-", suffix=".arrow")
        os.close(descriptor)
        self._remove = weakref.finalize(self, os.unlink, self._path)
        self._writer = pa.ipc.new_file(self._path, self._schema)
        self._waiting: list[Example] = []
        self._length = 0
        self._hash = hashlib.blake2b(digest_size=16, person=b"examples")
        self._batches: Any = None

    @property
    def digest(self) -> str:
        """Identifies what was added, in its order."""
        return self._hash.hexdigest()

    def add(self, example: Example) -> None:
        """Append one."""
        self._waiting.append(example)
        self._length += 1
        if len(self._waiting) == STORE_ROWS:
            self._write()

    def seal(self) -> None:
        """The end of writing and the beginning of reading."""
        import pyarrow as pa

        if self._waiting:
            self._write()
        self._writer.close()
        self._batches = pa.ipc.open_file(pa.memory_map(self._path))
        self._remove()  # the mapping keeps the bytes

    def _write(self) -> None:
        import pyarrow as pa

        tokens = pa.array([example.tokens for example in self._waiting], pa.list_(pa.int32()))
        packed = [_packed(example) for example in self._waiting]
        for example, text in zip(self._waiting, packed, strict=True):
            self._hash.update(f"{example.tokens}{text}\n".encode())
        texts = pa.array(packed, pa.string())
        self._writer.write_batch(pa.record_batch([tokens, texts], schema=self._schema))
        self._waiting = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Example:
        batch, place = divmod(number, STORE_ROWS)
        (row,) = self._batches.get_batch(batch).slice(place, 1).to_pylist()
        return Example(tokens=tuple(row["tokens"]), **json.loads(row["json"]))


def _packed(example: Example) -> str:
    fields = {name: getattr(example, name) for name in Example.__slots__ if name != "tokens"}
    return json.dumps(fields, default=str)  # dates and the like become text


def _prompt(index: int, example: Example) -> Prompt:
    return Prompt(
        prompt_index=index,
        text=example.text,
        tokens=example.tokens,
        answer=str(example.label),
        data_source=example.data_source,
        entry={
            "prompt": example.prompt,
            "label": example.label,
            "extra_info": example.extra_info,
            "columns": example.columns,
        },
    )


def _item(prompt: Prompt, text: str) -> Item:
    return Item(
        completion=text,
        prompt=prompt.entry["prompt"],
        data_source=prompt.data_source,
        ground_truth=prompt.entry["label"],
        extra_info=prompt.entry["extra_info"],
        columns=prompt.entry["columns"],
    )


def _chat(config: DataConfig, tokenizer: Any) -> Callable[[list[dict[str, str]]], str] | None:
    folder = getattr(tokenizer, "path", None)
    folder = None if folder is None else Path(folder).parent
    if config.chat == "plain" or (config.chat == "auto" and (folder is None or not has_chat_template(folder))):
        return None
    if folder is None:
        raise TaskError('task.data.chat is "template", but this tokenizer has none; set chat = "plain"')
    return ChatTemplate(folder)
