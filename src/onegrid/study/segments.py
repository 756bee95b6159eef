"""A long campaign in pieces that are kept as they are done, so that one that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import onegrid
from onegrid.errors import ConfigError
from onegrid.guard.verdict import Verdict
from onegrid.study.campaign import Outcome
from onegrid.study.corruptions import Tally
from onegrid.study.kills import Kills

SEGMENT = 50
"""Synchronizations of a piece, each piece with a pairing and a seed of its own."""
KILLS = 10


def kept(folder: Path | None, name: str, make: Callable[[], Any], read: Callable[[dict[str, Any]], Any]) -> Any:
    """What `make` gives, from `folder`/name.json where it was made before; a piece half done leaves nothing.

    Raises ConfigError for a file that holds something else, and for a piece that other code than this made.
    """
    if folder is None:
        return make()
    path, code = folder / f"{name}.json", code_digest()  # before it is made: files may change meanwhile
    if path.exists():
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if held.pop("code") != code:
                raise ConfigError(f"{path} was made by other code than this; remove {folder}, to have all made by one")
            return read(held)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no piece of a campaign ({error!r}); remove it, to have it made") from error
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(_plain(made) | {"code": code}), encoding="utf-8")
    draft.rename(path)
    return made


@cache
def code_digest() -> str:
    """SHA-256 of the package's own source files, names and bytes."""
    root, found = Path(onegrid.__file__).parent, hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cu")):
        found.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def in_segments(
    run: Callable[[int, int], Tally], num: int, seed: int, folder: Path | None, name: str, done: Callable[[int], None]
) -> Tally:
    """`run(count, seed)` in pieces, added up. done  gets how many synchronizations there are so far."""
    total = Tally(num=num, seed=seed)
    for first in range(0, num, SEGMENT):
        count = min(SEGMENT, num - first)
        own = seed * 1_000_003 + first
        part = kept(folder, f"{name}_{seed}_{first}_{count}", lambda c=count, s=own: run(c, s), read_tally)  # type: ignore[misc]
        for field in ("alarms", "named_right", "unsafe", "seconds", "missed", "rows"):
            setattr(total, field, getattr(total, field) + getattr(part, field))
        total.by_check += part.by_check
        total.by_kind += part.by_kind
        total.device, total.weights = part.device, part.weights
        done(first + count)
    return total


def kills_in_segments(
    run: Callable[[int, int], Kills], num: int, seed: int, folder: Path | None, done: Callable[[int], None]
) -> Kills:
    """As `in_segments`, of runs that are killed."""
    total = Kills(num=num)
    for first in range(0, num, KILLS):
        count = min(KILLS, num - first)
        own = seed * 1_000_003 + first
        part = kept(folder, f"kills_{seed}_{first}_{count}", lambda c=count, s=own: run(c, s), lambda d: Kills(**d))  # type: ignore[misc]
        total.same, total.killed = total.same + part.same, total.killed + part.killed
        total.different += part.different
        done(first + count)
    return total


def _plain(made: Any) -> dict[str, Any]:
    """`asdict`, which would take a counter's pairs for things to count."""
    counters = {f.name: dict(x) for f in fields(made) if isinstance(x := getattr(made, f.name), Counter)}
    return asdict(replace(made, **{name: {} for name in counters})) | counters


def read_tally(values: dict[str, Any]) -> Tally:
    """From JSON."""
    counters = {key: Counter(values[key]) for key in ("by_check", "by_kind")}
    return Tally(**(values | counters))


def read_outcome(values: dict[str, Any]) -> Outcome:
    """From JSON."""
    tuples = {f.name for f in fields(Verdict)} & {"tensors", "where"}
    verdicts = [Verdict(**(v | {key: tuple(v[key]) for key in tuples})) for v in values["verdicts"]]
    return Outcome(**(values | {"verdicts": tuple(verdicts), "fires": tuple(values["fires"])}))
