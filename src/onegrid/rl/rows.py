"""Rows of parquet and JSONL files, one at a time, with the file and the row named in whatever is wrong.

Rows come as they are; what they mean is for rl/dataset.py to say. The files are streamed, never read whole.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onegrid.errors import TaskError

BATCH_ROWS = 1024
MAGIC = {
    b"\x1f\x8b": "; it looks packed by gzip, so unpack it",
    b"\xff\xfe": "; it looks like UTF-16",
    b"\xfe\xff": "; it looks like UTF-16",
}
"""What the first bytes of whole files of other kinds say."""
MISSING = object()


class RowError(TaskError):
    """One row is not usable. `kind` is the short name that skipped rows are counted by."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Row:
    """A row, or what is wrong with it."""

    file: Path
    number: int
    """From 1; in JSONL the line."""
    values: Mapping[str, Any]
    fault: RowError | None = None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.file}, row {self.number}"


def read_rows(path: Path, *, max_row_bytes: int) -> Iterator[Row]:
    """The rows of a .parquet, .jsonl or .ndjson file, in order; a bad one comes with its fault.

    max_row_bytes  a longer JSONL line is a fault, and is never held whole
    Raises TaskError for a file that is missing, of another kind, damaged as a whole, or empty.
    """
    readers = {".parquet": _parquet, ".jsonl": _jsonl, ".ndjson": _jsonl}
    if path.suffix not in readers:
        raise TaskError(f"{path} is not a data file; the name must end in {', '.join(readers)}")
    empty = True
    try:
        for row in readers[path.suffix](path, max_row_bytes):
            empty = False
            yield row
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    if empty:
        raise TaskError(f"{path} is empty; it must have at least one row")


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value of a column, or with dots of a field inside it ("reward_model.ground_truth"); MISSING if not there.

    A field of something that is null is null.
    """
    if key in row:
        return row[key]
    found: Any = row
    for piece in key.split("."):
        if found is None:
            return None
        if not isinstance(found, Mapping) or piece not in found:
            return MISSING
        found = found[piece]
    return found


def no_column(row: Row, key: str, *, setting: str) -> RowError:
    """The error for a key that a row does not have."""
    names = list(_names(row.values))
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return RowError(
        f"{row.place} has no {key!r}; {hint}it has {', '.join(names)}; set {setting} to the right one",
        kind="no_column",
    )


def _names(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield path + name
        if isinstance(value, Mapping):
            yield from _names(value, f"{path}{name}.")


def _parquet(path: Path, max_row_bytes: int) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)  # of files that were written with sums
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise TaskError(f"{path} is no parquet file, or is damaged: {error}") from error
    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for values in _batch_rows(batch):
                    number += 1
                    fault = _not_utf8(path, number, values) if isinstance(values, UnicodeDecodeError) else None
                    yield Row(path, number, {} if isinstance(values, UnicodeDecodeError) else values, fault)
        except (pa.ArrowInvalid, pa.ArrowException) as error:
            raise TaskError(f"{path} is damaged after row {number}: {error}") from error


def _batch_rows(batch: Any) -> Sequence[dict[str, Any] | UnicodeDecodeError]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # somewhere in the batch: look at each row
        found: list[dict[str, Any] | UnicodeDecodeError] = []
        for i in range(batch.num_rows):
            try:
                found += batch.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                found.append(error)
        return found


def _jsonl(path: Path, max_row_bytes: int) -> Iterator[Row]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_row_bytes + 2):
            number += 1
            if len(line.rstrip(b"\r\n")) > max_row_bytes:
                num_bytes = len(line)
                while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                    num_bytes += len(line)
                yield Row(path, number, {}, too_big(path, number, num_bytes, max_row_bytes))
            elif line.strip():
                yield _json_row(path, number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _json_row(path: Path, number: int, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(path, number, {}, _not_utf8(path, number, error))
    except (ValueError, RecursionError) as error:
        said = f"{path}, row {number} is not JSON: {error}; each line must be one whole object"
        return Row(path, number, {}, RowError(said, kind="not_json"))
    if not isinstance(values, dict):
        found = RowError(f"{path}, row {number} is a {type(values).__name__}, not an object", kind="not_json")
        return Row(path, number, {}, found)
    return Row(path, number, values)


def too_big(path: Path, number: int, num_bytes: int, limit: int) -> RowError:
    """The error for a row that is longer than allowed."""
    return RowError(
        f"{path}, row {number} has {num_bytes} bytes; at most {limit} are allowed (max_row_bytes)", kind="too_big"
    )


def _not_utf8(path: Path, number: int, error: UnicodeDecodeError) -> RowError:
    other = MAGIC.get(bytes(error.object[:2]), "") if number == 1 and path.suffix != ".parquet" else ""
    return RowError(f"{path}, row {number} is not UTF-8: {error}{other}", kind="bad_utf8")
