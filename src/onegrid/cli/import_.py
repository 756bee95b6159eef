"""`onegrid import`: a GGUF file becomes a checkpoint that everything else here, and transformers, can open."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from onegrid.convert.gguf import import_gguf
from onegrid.model.spec import tensor_shapes


def run(source: Path, target: Path, *, shard_bytes: int) -> None:
    """See `onegrid import --help`."""
    console = Console(highlight=False)
    count = 0

    def done(name: str) -> None:
        nonlocal count
        count += 1
        status.update(f"{count} tensors, {name}")

    with console.status("reading") as status:
        made = import_gguf(source, target, max_shard_bytes=shard_bytes, done=done)
    spec = made.spec
    formats = ", ".join(f"{number} {name}" for name, number in made.stored.items())
    console.print(
        f"{made.folder}: {spec.family}, {spec.num_layers} layers, {len(tensor_shapes(spec))} tensors in BF16, "
        f"{made.num_bytes / 1e6:.0f} MB, decoded from {formats}",
        soft_wrap=True,
    )
