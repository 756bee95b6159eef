"""Small files of exactly the shape in which GSM8K and DAPO-Math-17k are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DAPO_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)


def gsm8k_rows(n: int) -> list[dict[str, Any]]:
    """question, and an answer that is a solution ending in `#### x`."""
    return [
        {"question": f"{i}+{i + 1}=", "answer": f"{i} and {i + 1} make {2 * i + 1}\n#### {2 * i + 1}"} for i in range(n)
    ]


def dapo_rows(n: int) -> list[dict[str, Any]]:
    """verl's columns."""
    return [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{i}+{i}=", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(2 * i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{i}"},
        }
        for i in range(n)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """One row a line; bytes are written as they are."""
    with open(path, "wb") as file:
        for row in rows:
            file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None, **settings: Any) -> str:
    """One table."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **settings)
    return str(path)
