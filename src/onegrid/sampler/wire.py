"""What a sampler takes and gives, as bytes for a network: JSON for what is small, safetensors for tensors.

Both readers build data and nothing else; no byte that arrives is ever run. Log-probabilities travel as their FP32
bytes, so that equal bits stay equal.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.types import Bucket, Piece, Request, Rollout

T = TypeVar("T")
FRAME = "application/octet-stream"


class WireError(CapabilityError):
    """Bytes that are not what this end reads; what was wrong stands in the message."""


def pack(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file in memory, with `meta` (anything JSON holds) in its header."""
    from safetensors.torch import save

    held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    return save(held, metadata={"meta": json.dumps(meta)})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `pack` was given, tensors on the CPU. Raises WireError for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        (size,) = struct.unpack("<Q", data[:8])
        meta = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["meta"])
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:
        raise WireError(f"{len(data)} bytes are no frame of this protocol: {type(error).__name__}: {error}") from error
    if not isinstance(meta, dict):
        raise WireError(f"a frame's header holds an object, not {type(meta).__name__}")
    return meta, tensors


def read(cls: type[T], tree: Any, where: str) -> T:
    """The dataclass `cls`, nested ones included, from what JSON gives. Raises WireError naming the field."""
    if not isinstance(tree, dict):
        raise WireError(f"{where} must be an object, not {type(tree).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = tree.keys() - hints.keys()
    if unknown:
        raise WireError(f"{where} has no field {sorted(unknown)}; it has {', '.join(hints)}")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in tree.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise WireError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, where)
    if origin in (tuple, frozenset) and isinstance(value, list):
        return origin(_value(arguments[0], v, where) for v in value)
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], v, f"{where}.{key}") for key, v in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is hint:
        return value
    raise WireError(f"{where} must be {getattr(hint, '__name__', hint)}, not {str(value)[:60]!r}")


def tree(value: Any) -> Any:
    """A dataclass as JSON holds it; `read` gives it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: tree(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: tree(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [tree(v) for v in value]
    return sorted(value) if isinstance(value, frozenset) else value


def pack_bucket(bucket: Bucket) -> bytes:
    """Names and offsets in the header, all bytes in one run."""
    pieces = [[piece.name, piece.part, piece.offset, piece.data.numel()] for piece in bucket.pieces]
    data = [piece.data.detach().cpu() for piece in bucket.pieces]
    joined = torch.cat(data) if data else torch.empty(0, dtype=torch.uint8)
    return pack({"version": bucket.version, "pieces": pieces}, {"data": joined})


def unpack_bucket(data: bytes) -> Bucket:
    """See `pack_bucket`. Raises WireError where names and bytes do not fit together."""
    meta, tensors = unpack(data)
    version, listed, run = meta.get("version"), meta.get("pieces"), tensors.get("data")
    if type(version) is not int or not isinstance(listed, list) or run is None or run.dtype != torch.uint8:
        raise WireError("a bucket has a version, a list of pieces and one run of bytes")
    pieces: list[Piece] = []
    start = 0
    run = run.reshape(-1)
    for item in listed:
        if not isinstance(item, list) or [type(x) for x in item] != [str, str, int, int] or item[3] < 0:
            raise WireError(f"a piece is [name, part, offset, number of bytes], not {str(item)[:80]}")
        name, part, offset, size = item
        pieces.append(Piece(name=name, part=part, offset=offset, data=run[start : start + size]))
        start += size
    if start != run.numel():
        raise WireError(f"the pieces of a bucket have {start} bytes, {run.numel()} came with it")
    return Bucket(version=version, pieces=tuple(pieces))


def pack_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """Tokens, log-probabilities and versions of all rollouts one after another; requests stay with who asked."""
    meta = [
        {
            "num_tokens": len(r.tokens_R),
            "finish": r.finish,
            "text": r.text,
            "kept": r.kept is not None,
            "routing": None if r.routing_RLE is None else list(r.routing_RLE.shape[1:]),
        }
        for r in rollouts
    ]
    kept = [ids for r in rollouts for ids in r.kept or ()]
    routing = [r.routing_RLE.reshape(-1) for r in rollouts if r.routing_RLE is not None]
    tensors = {
        "tokens": _joined([r.tokens_R for r in rollouts], torch.int64),
        "logp": _joined([r.logp_R for r in rollouts], torch.float32),
        "version": _joined([r.version_R for r in rollouts], torch.int64),
        "kept": _joined(kept, torch.int64),
        "kept_lengths": torch.tensor([len(ids) for ids in kept], dtype=torch.int64),
        "routing": _joined(routing, torch.int16),
    }
    return pack({"rollouts": meta}, tensors)


def unpack_rollouts(data: bytes, requests: Sequence[Request]) -> list[Rollout]:
    """See `pack_rollouts`. Raises WireError where the answer is not one rollout for each request."""
    meta, tensors = unpack(data)
    listed = meta.get("rollouts")
    if not isinstance(listed, list) or len(listed) != len(requests):
        raise WireError(f"{len(requests)} rollouts were asked for; the answer holds {listed!r:.80}")
    try:
        runs = {name: _Run(tensors[name]) for name in ("tokens", "logp", "version", "kept", "kept_lengths", "routing")}
        return [_rollout(request, about, runs) for request, about in zip(requests, listed, strict=True)]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WireError(f"the rollouts of the answer do not fit together: {type(error).__name__}: {error}") from error


def _rollout(request: Request, about: dict[str, Any], runs: dict[str, _Run]) -> Rollout:
    count = int(about["num_tokens"])
    kept = None
    if about["kept"]:
        kept = tuple(runs["kept"].take(int(size)) for size in runs["kept_lengths"].take(count))
    routing = None
    if about["routing"] is not None:
        layers, slots = about["routing"]
        routing = runs["routing"].take(count * layers * slots).view(count, layers, slots)
    return Rollout(
        request=request,
        tokens_R=runs["tokens"].take(count),
        logp_R=runs["logp"].take(count),
        version_R=runs["version"].take(count),
        finish=str(about["finish"]),
        text=str(about["text"]),
        kept=kept,
        routing_RLE=routing,
    )


class _Run:
    """Reads one tensor piece by piece."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.at = x, 0

    def take(self, count: int) -> Tensor:
        taken = self.x[self.at : self.at + count]
        if count < 0 or len(taken) != count:
            raise ValueError(f"{count} elements from {self.at} of {len(self.x)}")
        self.at += count
        return taken.clone()


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([x.cpu().to(dtype) for x in parts]) if parts else torch.empty(0, dtype=dtype)
