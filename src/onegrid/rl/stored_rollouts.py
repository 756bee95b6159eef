"""Rollouts of a step as a table and back, with every bit that a learner needs: in parquet, and inside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onegrid.errors import CheckpointError
from onegrid.rl.dynamic import Drawn
from onegrid.rl.summary import is_informative
from onegrid.types import Group, Problem, Request, Rollout, Sampling

TextOf = Callable[[Sequence[int]], str]
"""Text of the tokens of a prompt."""


def table_of(step: int, groups: Sequence[Group], text_of: TextOf, *, learned: Sequence[Group] | None = None) -> Any:
    """A pyarrow table with one row for every rollout.

    learned  the groups that the step learns from; None: all

    step, group, sample, seed  which request; with `prompt_tokens` all of it but the sampling parameters
    prompt, response           text, for people
    reward, scored             reward is null where it could not be scored
    rewards                    each of several by name, before its weight
    data_source, ground_truth, extra_info
                               what rewards are given besides the response, the last two as JSON: enough to score it
                               again. Null in files of earlier versions, which train all the same
    tokens, logp, version      of the response; logp FP32 nats
    finish                     "stop" or "length"
    learned                    False for groups that dynamic sampling left out
    kept                       per token the ids of the kept set, null where nothing was truncated
    routing, routing_shape     expert ids in the order tokens, layers, slots; null where not recorded
    """
    import pyarrow as pa

    prompts = {g.group_id: text_of(g.rollouts[0].request.prompt_tokens) for g in groups if g.rollouts}
    problems = {g.group_id: _problem_columns(g.problem) for g in groups}
    chosen = {g.group_id for g in (groups if learned is None else learned)}
    rows = [(g.group_id, r) for g in groups for r in g.rollouts]
    found = [r for _, r in rows]
    kept = [None if r.kept is None else [ids.tolist() for ids in r.kept] for r in found]
    routes = [None if r.routing_RLE is None else r.routing_RLE for r in found]
    return pa.table(
        {
            "step": pa.array([step] * len(rows), pa.int32()),
            "group": pa.array([group for group, _ in rows], pa.int64()),
            "sample": pa.array([r.request.sample for r in found], pa.int32()),
            "seed": pa.array([r.request.seed for r in found], pa.int64()),
            "prompt": pa.array([prompts[group] for group, _ in rows], pa.string()),
            "response": pa.array([r.text for r in found], pa.string()),
            "reward": pa.array([r.reward for r in found], pa.float64()),
            "scored": pa.array([r.scored for r in found], pa.bool_()),
            "rewards": pa.array([list(r.rewards.items()) for r in found], pa.map_(pa.string(), pa.float64())),
            **{
                name: pa.array([problems[group][i] for group, _ in rows], pa.string()) for i, name in enumerate(PROBLEM)
            },
            "prompt_tokens": pa.array([list(r.request.prompt_tokens) for r in found], pa.list_(pa.int32())),
            "tokens": _lists([r.tokens_R for r in found], torch.int32),
            "logp": _lists([r.logp_R for r in found], torch.float32),
            "version": _lists([r.version_R for r in found], torch.int64),
            "finish": pa.array([r.finish for r in found], pa.string()),
            "learned": pa.array([group in chosen for group, _ in rows], pa.bool_()),
            "kept": pa.array(kept, pa.list_(pa.list_(pa.int32()))),
            "routing": pa.array([None if x is None else x.flatten().tolist() for x in routes], pa.list_(pa.int16())),
            "routing_shape": pa.array([None if x is None else list(x.shape) for x in routes], pa.list_(pa.int32())),
        }
    )


def drawn_from(table: Any, sampling: Sampling, *, place: str) -> Drawn:
    """What `table_of` was given, byte for byte.

    sampling  of the requests
    place     where the table comes from, for messages
    Raises CheckpointError for a table that is none of rollouts, or has none.
    """
    missing = sorted(set(COLUMNS) - set(table.column_names))
    if missing:
        raise CheckpointError(f"{place} lacks the columns {', '.join(missing)}; rollouts of this version have them")
    if not table.num_rows:
        raise CheckpointError(f"{place} holds no rollout")
    generated: dict[int, list[Rollout]] = {}
    learned: dict[int, bool] = {}
    try:
        columns = {name: table[name].to_pylist() for name in COLUMNS if name not in ("tokens", "logp", "version")}
        for name in (*PROBLEM, "rewards"):
            columns[name] = table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
        problems: dict[int, Problem | None] = {}
        arrays = {name: _arrays(table[name]) for name in ("tokens", "logp", "version")}
        for i in range(table.num_rows):
            row = {name: values[i] for name, values in columns.items()}
            lengths = {len(arrays[name][i]) for name in arrays}
            if len(lengths) != 1:
                raise CheckpointError(f"{place}, row {i + 1}: tokens, logp and version are not equally many")
            generated.setdefault(row["group"], []).append(_rollout(row, {n: x[i] for n, x in arrays.items()}, sampling))
            learned[row["group"]] = row["learned"]
            if row["group"] not in problems:
                problems[row["group"]] = _problem(row)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{place} does not hold rollouts: {error}") from error
    groups = [Group(group_id=i, rollouts=tuple(rollouts), problem=problems[i]) for i, rollouts in generated.items()]
    return Drawn(
        groups=tuple(group for group in groups if learned[group.group_id]),
        generated=tuple(groups),
        num_constant=sum(not is_informative(group) for group in groups),
        num_rounds=0,
        message="",
    )


def read_rollouts(folder: Path, step: int, sampling: Sampling, *, vocab_size: int) -> Drawn:
    """The rollouts of one step of a run directory, or of a folder with its parquet files.

    vocab_size  of the model that learns from them
    Raises CheckpointError for a file that is missing or no such table, or that has ids which the model has no row for.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    path = folder / file_name(step)
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(
            f"cannot read the rollouts of step {step} from {path}: {error}; a run keeps those of every step with "
            "record.rollouts_every = 1"
        ) from error
    drawn = drawn_from(table, sampling, place=str(path))
    found = {i for g in drawn.generated for r in g.rollouts for i in (*r.request.prompt_tokens, *r.tokens_R.tolist())}
    strange = [i for i in found if not 0 <= i < vocab_size]
    if strange:
        raise CheckpointError(
            f"{path} has token {strange[0]}, but the ids of this model are 0 .. {vocab_size - 1}: it is of a run with "
            "another model; learn from its rollouts with that one"
        )
    return drawn


def file_name(step: int) -> str:
    """Of the rollouts of a step."""
    return f"step_{step:06d}.parquet"


def state_of(drawn: Drawn) -> Tensor:
    """The table as uint8 [bytes], for a checkpoint."""
    import pyarrow as pa

    table, sink = table_of(0, drawn.generated, lambda tokens: "", learned=drawn.groups), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)


def drawn_of(state: Tensor, sampling: Sampling) -> Drawn:
    """What `state_of` was given. Raises CheckpointError for bytes that are no such table."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(state.cpu().numpy().tobytes())) as reader:
            table = reader.read_all()
    except (OSError, TypeError, AttributeError, pa.ArrowException) as error:
        raise CheckpointError(f"the batch that was ahead cannot be read: {error}") from error
    return drawn_from(table, sampling, place="the batch that was ahead")


COLUMNS = (
    "group",
    "sample",
    "seed",
    "response",
    "reward",
    "scored",
    "prompt_tokens",
    "tokens",
    "logp",
    "version",
    "finish",
    "learned",
    "kept",
    "routing",
    "routing_shape",
)
"""What reading needs."""
PROBLEM = ("data_source", "ground_truth", "extra_info")


def _rollout(row: dict[str, Any], arrays: dict[str, Tensor], sampling: Sampling) -> Rollout:
    routing = row["routing"]
    return Rollout(
        request=Request(
            prompt_index=row["group"],
            sample=row["sample"],
            prompt_tokens=tuple(row["prompt_tokens"]),
            seed=row["seed"],
            sampling=sampling,
        ),
        tokens_R=arrays["tokens"].to(torch.int64),
        logp_R=arrays["logp"].to(torch.float32),
        version_R=arrays["version"].to(torch.int64),
        finish=row["finish"],
        text=row["response"],
        kept=None if row["kept"] is None else tuple(torch.tensor(ids, dtype=torch.int64) for ids in row["kept"]),
        routing_RLE=None
        if routing is None
        else torch.tensor(routing, dtype=torch.int16).reshape(tuple(row["routing_shape"])),
        reward=row["reward"],
        scored=row["scored"],
        rewards=dict(row["rewards"] or ()),
    )


def _problem_columns(problem: Problem | None) -> tuple[str | None, ...]:
    if problem is None:
        return (None,) * len(PROBLEM)
    as_json = [json.dumps(value, default=str) for value in (problem.ground_truth, problem.extra_info)]
    return (problem.data_source.encode(errors="replace").decode(), *as_json)


def _problem(row: dict[str, Any]) -> Problem | None:
    if row["data_source"] is None:
        return None
    return Problem(
        data_source=row["data_source"],
        ground_truth=json.loads(row["ground_truth"]),
        extra_info=json.loads(row["extra_info"]),
    )


def _lists(tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """One list a tensor, without a Python number for each element."""
    import pyarrow as pa

    ends = np.cumsum([0, *(len(t) for t in tensors)], dtype=np.int32)
    flat = torch.cat([t.to("cpu", dtype) for t in tensors]) if tensors else torch.empty(0, dtype=dtype)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat.numpy()))


def _arrays(column: Any) -> list[Tensor]:
    """The lists of a column as tensors; what is no list of numbers raises."""
    found = []
    for item in column:
        if not item.is_valid:
            raise ValueError("a list is null")
        found.append(torch.from_numpy(item.values.to_numpy(zero_copy_only=False).copy()))
    return found
