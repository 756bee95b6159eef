"""Converting a checkpoint: planned from headers, written shard by shard beside the target, put in place by one rename.

An interrupted conversion leaves a hidden folder next to the target; running the same again goes on from its whole files
and gives the same bytes. Whatever was at the target stays until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onegrid.convert.by_rows import one_core_each
from onegrid.convert.prepare import extra_tensors, identity_of, prepare
from onegrid.convert.shard_files import write_file
from onegrid.convert.source import open_source
from onegrid.convert.staging import check_target, finish, side_files, staging_of, whole_files, working
from onegrid.convert.weights import Converter
from onegrid.errors import WeightsError
from onegrid.recipe import Plan, Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a conversion did, and why every key of the source that has no namesake in the target is not missing."""

    plan: Plan
    layout: str | None
    files: tuple[str, ...]
    reused: tuple[str, ...]
    """Files that an earlier attempt had finished."""
    num_bytes: int
    dropped: dict[str, str]
    """Key of the source without namesake in the target -> where its content went, or why it is not needed."""
    extra: tuple[str, ...]
    """Tensors of layers and heads beyond the main model, which were kept."""
    notes: tuple[str, ...]


def convert(
    source: Path | str,
    target: Path | str,
    recipe: Recipe,
    *,
    layout: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    threads: int = 2,
    on_tensor: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Write a checkpoint in the formats of a recipe, in one of the published layouts.

    source, target   folders
    recipe           what becomes of every tensor; one that quantizes nothing gives BF16 again
    layout           "modelopt", "sglang", "compressed-tensors" or "deepseek"; None only where nothing is quantized
    max_shard_bytes  a new file begins above it; a single weight may exceed it
    overwrite        replace a target that is not empty
    threads          weights that are worked on at a time; bytes do not depend on it
    on_tensor        called after each weight with its name, its place and the number of all
    Weights are rounded to BF16 before they are quantized, as learner and sampler do; tensors that stay unquantized keep
    their bytes. As many weights as threads, and one more, are in memory. Raises WeightsError, RecipeError and
    NonFiniteError before anything at the target changes, CheckpointError when the disk refuses.
    """
    if threads < 1 or max_shard_bytes < 1:
        raise WeightsError(f"threads is {threads} and max_shard_bytes {max_shard_bytes}; both must be at least 1")
    folder, target = Path(source), Path(os.path.abspath(target))
    check_target(folder, target, overwrite=overwrite)
    work = prepare(open_source(folder), recipe, layout, max_shard_bytes)
    side_files(folder, set())  # refuses what it would not copy, before anything is written
    staging = staging_of(target)
    converter = Converter(work.source, work.plan, work.rows)
    total = sum(len(file.weights) for file in work.files)
    num_done = 0

    def done(name: str) -> None:
        nonlocal num_done
        num_done += 1
        if on_tensor is not None:
            on_tensor(name, num_done, total)

    with working(staging, identity_of(work, layout, max_shard_bytes)), one_core_each():
        reused = whole_files(staging, work.files)
        for file in work.files:
            if file.name in reused:
                for name in file.weights:
                    done(name)
            else:
                write_file(file, staging, converter.tensors, done=done, threads=threads)
        finish(staging, target, work)
    work.source.close()
    return Report(
        plan=work.plan,
        layout=layout,
        files=tuple(file.name for file in work.files),
        reused=tuple(reused),
        num_bytes=sum(file.size for file in work.files),
        dropped=work.dropped,
        extra=extra_tensors(work.plan),
        notes=work.notes,
    )
