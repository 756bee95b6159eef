"""Some rollouts of a run, token by token, each with its log-probability and the version that made it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onegrid.errors import OnegridError
from onegrid.report.reading import Run

MAX_TOKENS = 300
MAX_PROMPT = 1200
GROUPS, ROLLOUTS = 2, 4
"""Of each of three steps: the first, the one in the middle and the last that were kept."""

COLUMNS = ("group", "sample", "prompt", "response", "reward", "tokens", "logp", "version", "finish", "ground_truth")
MAX_TRUTH = 120
"""Characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token of a response."""

    text: str
    logp: float | None
    """Nats; None where the record has no number."""
    version: int | None
    level: int
    """0 for a token that was as good as certain, up to 5 for one that was less likely than 1 in 50."""
    turns: bool
    """Whether another version begins here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rollout."""

    step: int
    prompt: str
    tokens: tuple[Token, ...]
    left_out: int
    """Tokens beyond MAX_TOKENS."""
    reward: float | None
    truth: str
    """What the rewards were given as the label; empty where the record does not say."""
    finish: str
    versions: str
    total: float | None
    """Sum of the log-probabilities of all its tokens, in nats."""


def samples(run: Run, missing: list[str]) -> list[list[Sample]]:
    """Groups of rollouts. What cannot be shown is added to `missing` as a sentence."""
    files = sorted((run.folder / "rollouts").glob("step_*.parquet"))
    if not files:
        missing.append("No rollouts were kept (record.rollouts_every, or no step is done yet).")
        return []
    text_of = _decoder(run, missing)
    found = []
    for path in dict.fromkeys((files[0], files[len(files) // 2], files[-1])):
        rows = _rows(path, missing)
        step = int(path.stem.removeprefix("step_")) if path.stem.removeprefix("step_").isdigit() else 0
        found += [[_sample(step, row, text_of) for row in group[:ROLLOUTS]] for group in _chosen(rows)]
    return found


def _rows(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = [name for name in COLUMNS if name in file.schema_arrow.names]
        if not {"tokens", "logp"} <= set(names):
            missing.append(f"rollouts/{path.name} has no tokens with log-probs and is left out.")
            return []
        return list(next(file.iter_batches(batch_size=1024, columns=names)).to_pylist())
    except StopIteration:
        return []
    except (OSError, pa.ArrowException) as error:
        missing.append(f"rollouts/{path.name} cannot be read ({type(error).__name__}) and is left out.")
        return []


def _chosen(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups in which rewards differ come first: they are what a step learns from."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group"), []).append(row)
    ordered = sorted(groups.values(), key=lambda group: len({row.get("reward") for row in group}) == 1)
    return ordered[:GROUPS]


def _sample(step: int, row: dict[str, Any], text_of: Callable[[Sequence[int]], list[str]]) -> Sample:
    ids, logp, version = ([*(row.get(name) or [])] for name in ("tokens", "logp", "version"))
    pieces = text_of(ids[:MAX_TOKENS])
    tokens: list[Token] = []
    for i, text in enumerate(pieces):
        value = logp[i] if i < len(logp) and logp[i] is not None and math.isfinite(logp[i]) else None
        made_by = version[i] if i < len(version) else None
        turns = bool(tokens) and tokens[-1].version != made_by
        shown = text.replace("\n", "↵\n")
        shown = shown.removesuffix("\n") if i + 1 == len(ids) else shown
        tokens.append(Token(text=shown, logp=value, version=made_by, level=_level(value), turns=turns))
    known = [v for v in version if v is not None]
    prompt = str(row.get("prompt") or "")
    if len(prompt) > MAX_PROMPT:
        prompt = f"… {len(prompt) - MAX_PROMPT:,} characters left out …\n" + prompt[-MAX_PROMPT:]
    complete = bool(logp) and all(v is not None and math.isfinite(v) for v in logp)
    span = "unknown" if not known else str(known[0]) if min(known) == max(known) else f"{min(known)} to {max(known)}"
    return Sample(
        step=step,
        prompt=prompt,
        tokens=tuple(tokens),
        left_out=max(0, len(ids) - MAX_TOKENS),
        reward=row.get("reward"),
        truth=_truth(row.get("ground_truth")),
        finish=str(row.get("finish") or "unknown"),
        versions=span,
        total=math.fsum(logp) if complete else None,
    )


def _truth(text: Any) -> str:
    """The label that a rollout file has as JSON, on one line. A solution counts by its end, where the answer stands."""
    if not isinstance(text, str):
        return ""
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    line = " ".join(str(found).split()).encode(errors="replace").decode()
    return line if len(line) <= MAX_TRUTH else "… " + line[-MAX_TRUTH:]


def _level(logp: float | None) -> int:
    """By probability: above 9/10, 1/2, 1/4, 1/10, 1/50, and below."""
    if logp is None:
        return 0
    return sum(logp < math.log(bound) for bound in (0.9, 0.5, 0.25, 0.1, 0.02))


def _decoder(run: Run, missing: list[str]) -> Callable[[Sequence[int]], list[str]]:
    """Texts of the single tokens, by the tokenizer of the run's model; their numbers where it is not here."""
    from onegrid.rl.tokenizer import load_tokenizer

    folder = run.table("model").get("checkpoint")
    try:
        if not isinstance(folder, str):
            raise OnegridError("the configuration names no model")
        tokenizer = load_tokenizer(Path(folder))
    except (OnegridError, OSError) as error:
        missing.append(f"Tokens are shown as numbers: the tokenizer of the run cannot be loaded ({error}).")
        return lambda ids: [f"[{i}]" for i in ids]

    def pieces(ids: Sequence[int]) -> list[str]:
        found, before = [], ""
        for end in range(1, len(ids) + 1):
            now = tokenizer.decode(ids[:end])
            common = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
            found.append(now[common:] or f"[{ids[end - 1]}]")
            before = now
        return found

    return pieces
