"""Faults of C5 and C7: what gets lost on the way, and what outlives an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from onegrid.guard.inject_grid import WORD
from onegrid.guard.injection import Bench, last_expert, moved, put_back, wrap
from onegrid.model.canonical import raw_bytes
from onegrid.types import Bucket, Piece


def bucket_lost(bench: Bench) -> None:
    """The second bucket of a version never arrives."""
    _in_receive(bench, lambda at, bucket: [] if at == 1 else [bucket])


def bucket_twice(bench: Bench) -> None:
    """The second bucket of a version arrives twice."""
    _in_receive(bench, lambda at, bucket: [bucket, bucket] if at == 1 else [bucket])


def bucket_cut(bench: Bench) -> None:
    """Of the last piece of the second bucket only half arrives."""

    def cut(at: int, bucket: Bucket) -> list[Bucket]:
        if at != 1:
            return [bucket]
        *rest, last = bucket.pieces
        half = dataclasses.replace(last, data=last.data[: len(last.data) // 2])
        bench.touched = {last.name}
        return [dataclasses.replace(bucket, pieces=(*rest, half))]

    _in_receive(bench, cut)


def buckets_reordered(bench: Bench) -> None:
    """Buckets arrive in pairs, the later one first. Not a fault: any order is right."""
    waiting: list[Bucket] = []

    def receive(original: Callable[[Bucket], None], bucket: Bucket) -> None:
        if not bench.armed:
            return original(bucket)
        waiting.append(bucket)
        if len(waiting) == 2:
            original(waiting.pop())
            original(waiting.pop())
            bench.touch([])
        return None

    def commit(original: Callable[[int], Any], version: int) -> Any:
        while waiting:
            original_receive(waiting.pop())
        return original(version)

    original_receive = bench.sampler.receive
    wrap(bench.sampler, "receive", receive)
    wrap(bench.sampler, "commit", commit)


def wire_breaks(bench: Bench) -> None:
    """The sender's connection fails in the middle."""

    def fail(at: int, bucket: Bucket) -> list[Bucket]:
        if at == 1:
            bench.touch([])
            raise ConnectionError("the connection was closed by the other side")
        return [bucket]

    _in_receive(bench, fail)


def byte_on_the_wire(bench: Bench) -> None:
    """One byte of one bucket changes on the way, of a linear that every prompt reads."""
    done: list[str] = []

    def flip(at: int, bucket: Bucket) -> list[Bucket]:
        names = [piece.name for piece in bucket.pieces]
        mine = [i for i, name in enumerate(names) if name.endswith("_proj.weight") and ".experts." not in name]
        if at < 1 or done or not mine:
            return [bucket]
        pieces = list(bucket.pieces)
        changed = pieces[mine[-1]]
        data = changed.data.clone()
        data[-1] ^= 0x10
        pieces[mine[-1]] = dataclasses.replace(changed, data=data)
        done.append(changed.name)
        bench.touch(done)
        return [dataclasses.replace(bucket, pieces=tuple(pieces))]

    _in_receive(bench, flip)


def scales_never_sent(fill: int) -> Callable[[Bench], None]:
    """The scales of a class of layers are never written, hold one byte everywhere, and the loader counts them."""

    def inject(bench: Bench) -> None:
        def place_of(original: Callable[[Piece], Tensor], piece: Piece) -> Tensor:
            place = original(piece)
            if not (bench.armed and piece.part == "scales" and piece.name.endswith("down_proj.weight")):
                return place
            place.fill_(fill)
            bench.touch([piece.name])
            return torch.empty_like(place)  # where the bytes go instead

        wrap(bench.intake, "place_of", place_of)

    return inject


def skipped(names_of: Callable[[Bench], list[str]]) -> Callable[[Bench], None]:
    """A loader that does not know some names, leaves the old weights there and reports success."""

    def inject(bench: Bench) -> None:
        def swap(original: Callable[[], None]) -> None:
            original()
            if bench.armed:
                put_back(bench, names_of(bench))

        wrap(bench.intake, "swap", swap)

    return inject


def one_moved(bench: Bench) -> list[str]:
    """The last expert's tensor that has moved."""
    return [last_expert(moved(bench))]


def norms_moved(bench: Bench) -> list[str]:
    """Every tensor that is not quantized and has moved."""
    return moved(bench, "values")


def attention_moved(bench: Bench) -> list[str]:
    """q, k and v of all layers, as far as they have moved."""
    return [n for n in moved(bench) if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]


def commit_ignored(bench: Bench) -> None:
    """A sampler that changes nothing, counts the version up, and answers with the digests it was sent."""

    def swap(original: Callable[[], None]) -> None:
        if bench.learner.version >= bench.at:
            bench.touch([])
            return None
        return original()

    def digests(original: Callable[[Iterable[str]], dict[str, int]], names: Iterable[str]) -> dict[str, int]:
        if not bench.armed:
            return original(names)
        tensors = bench.learner.canonical()
        from onegrid.sync import entry_of

        entries = {name: entry_of(tensors[name]) for name in names}
        return {n: sum(x.digest for x in e.parts.values()) & WORD for n, e in entries.items()}

    wrap(bench.intake, "swap", swap)
    wrap(bench.intake, "canonical_digests", digests)


def lost_in_sleep(bench: Bench) -> None:
    """The sampler sleeps between update and rollout, and a tensor does not come back whole."""
    done: list[int] = []

    def generate(original: Callable[..., Any], *arguments: Any) -> Any:
        if bench.armed and not done:
            done.append(1)
            name = last_expert(bench.weights.names())
            bench.sampler.sleep()
            raw_bytes(next(iter(bench.weights.parts(name).values())))[:8] = 0
            bench.weights.derive()
            bench.touch([name])
            bench.sampler.wake()
        return original(*arguments)

    wrap(bench.sampler, "generate", generate)


def prefix_kept(bench: Bench) -> None:
    """Cached prompts survive an update and are found again."""
    store = bench.sampler.prefixes

    def clear(original: Callable[[], None]) -> None:
        if not bench.armed:
            return original()
        if store.versions():
            bench.touch([])
        return None

    def get(original: Callable[..., Any], version: int, prompt: tuple[int, ...]) -> Any:
        for known in sorted(store.versions()):
            found = original(known, prompt) if bench.armed else None
            if found is not None:
                return found
        return original(version, prompt)

    wrap(store, "clear", clear)
    wrap(store, "get", get)


def in_flight(bench: Bench) -> None:
    """One completion was made before the update and is handed out after it."""

    def generate(original: Callable[..., Any], *arguments: Any) -> Any:
        rollouts = original(*arguments)
        if bench.armed:
            first = rollouts[0]
            rollouts[0] = dataclasses.replace(
                first, version_R=torch.full_like(first.version_R, bench.learner.version - 1)
            )
            bench.touch([])
        return rollouts

    wrap(bench.sampler, "generate", generate)


def other_temperature(bench: Bench) -> None:
    """The sampler draws, and reports, at another temperature than it was asked for."""

    def generate(original: Callable[..., Any], requests: Any, *rest: Any) -> Any:
        if not bench.armed:
            return original(requests, *rest)
        bench.touch([])
        hot = [
            dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=r.sampling.temperature * 1.05))
            for r in requests
        ]
        pairs = zip(requests, original(hot, *rest), strict=True)
        return [dataclasses.replace(rollout, request=request) for request, rollout in pairs]

    wrap(bench.sampler, "generate", generate)


def version_reset(bench: Bench) -> None:
    """The learner's counter begins anew."""

    def step(original: Callable[[], Any]) -> Any:
        metrics = original()
        if bench.armed:
            bench.learner.version = 0
            bench.touch([])
        return metrics

    wrap(bench.learner, "step", step)


def _in_receive(bench: Bench, change: Callable[[int, Bucket], list[Bucket]]) -> None:
    """change  (number of the bucket in its version, bucket) -> what arrives of it."""
    count = {"version": -1, "at": 0}

    def receive(original: Callable[[Bucket], None], bucket: Bucket) -> None:
        if not bench.armed:
            return original(bucket)
        if count["version"] != bucket.version:
            count.update(version=bucket.version, at=0)
        arriving = change(count["at"], bucket)
        if len(arriving) != 1 and not bench.touched:
            bench.touched = {piece.name for piece in bucket.pieces}
        if len(arriving) != 1 or arriving[0] is not bucket:
            bench.happened += 1
        count["at"] += 1
        for part in arriving:
            original(part)
        return None

    wrap(bench.sampler, "receive", receive)
