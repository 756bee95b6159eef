"""Weights as buckets of bytes: any size from one byte up, any order.

A bucket is filled to the last byte, across parts and tensors, so partners of a fused operand travel apart as often as
together; what they belong to is known from the manifest alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from onegrid.errors import ConfigError
from onegrid.model.canonical import Snapshot, parts_of, raw_bytes
from onegrid.types import Bucket, Piece

DEFAULT_BUCKET_BYTES = 64 << 20


def buckets(
    snapshot: Snapshot, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, order: int | None = None
) -> Iterator[Bucket]:
    """All bytes of `snapshot`, each once, in buckets of `bucket_bytes` (the last one may be smaller).

    order  None keeps the snapshot's order; an int shuffles the parts, and then the buckets, by that seed
    Pieces are views of the snapshot where its tensors are contiguous. Raises ConfigError for a size below 1.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    shuffled = None if order is None else random.Random(order)
    sizes = [
        (name, part, x.nbytes) for name, tensor in snapshot.tensors.items() for part, x in parts_of(tensor).items()
    ]
    if shuffled is not None:
        shuffled.shuffle(sizes)
    ranges = list(_ranges(sizes, bucket_bytes))
    if shuffled is not None:
        shuffled.shuffle(ranges)
    for pieces in ranges:
        yield Bucket(version=snapshot.version, pieces=tuple(_piece(snapshot, *piece) for piece in pieces))


def _ranges(sizes: list[tuple[str, str, int]], bucket_bytes: int) -> Iterator[list[tuple[str, str, int, int]]]:
    """(name, part, start, end) of every piece, bucket by bucket."""
    pieces: list[tuple[str, str, int, int]] = []
    room = bucket_bytes
    for name, part, total in sizes:
        start = 0
        while start < total:
            end = min(total, start + room)
            pieces.append((name, part, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield pieces
                pieces, room = [], bucket_bytes
    if pieces:
        yield pieces


def _piece(snapshot: Snapshot, name: str, part: str, start: int, end: int) -> Piece:
    data = raw_bytes(parts_of(snapshot.tensors[name])[part].detach().contiguous())[start:end]
    return Piece(name=name, part=part, offset=start, data=data)
