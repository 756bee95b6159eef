"""Checkpoints in and out: Hugging Face safetensors folders and the canonical tensors of a model.

Reading accepts what people have (one file or shards, tied heads with and without their key, experts one by one or
packed in three axes) and refuses what does not fit, by name. Writing puts every file under a temporary name first, so
that a full disk or a kill leaves the checkpoint that was there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError, WeightsError
from onegrid.formats import count_true
from onegrid.model.shards import entries, open_shard, read_object, some, write_checkpoint
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe.kinds import canonical_shapes, packed_parts

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Element types that weights may have on disk."""


def load_weights(folder: Path | str, spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor on the CPU, BF16 as stored or FP32 (FP16 becomes FP32, exactly), in forward order.

    folder  holds model.safetensors, or shards with model.safetensors.index.json
    Raises WeightsError for a missing, extra, truncated or wrongly shaped tensor, for one in a format that is not a
    plain float, and for a tied head that differs from the embedding; NonFiniteError for NaN or Inf, with the count.
    """
    folder = Path(folder)
    found = entries(folder)
    wanted = tensor_shapes(spec)
    parts = {raw: packed_parts(raw, e.shape) or {raw: e.shape} for raw, e in found.items() if not _derived(raw)}
    if spec.tied:
        parts.pop("lm_head.weight", None)
    _check_names(folder, wanted, parts, {raw: entry.dtype for raw, entry in found.items()})
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_shard(path)) for path in dict.fromkeys(e.file for e in found.values())}
        for raw, names in parts.items():
            tensor = _finite(raw, files[found[raw].file].get_tensor(raw))
            if tensor.dtype == torch.float16:
                tensor = tensor.float()
            rows = [tensor] if len(names) == 1 and raw in names else _experts(tensor, len(names))
            tensors |= dict(zip(names, rows, strict=True))
        if spec.tied and "lm_head.weight" in found:
            head_VD = files[found["lm_head.weight"].file].get_tensor("lm_head.weight")
            _check_tie(head_VD, tensors["model.embed_tokens.weight"])
    return {name: tensors[name] for name in wanted}


def read_index(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, from the headers alone, as `onegrid.recipe.resolve` wants it.

    A tied head is left out where the folder's config.json says so. Raises WeightsError as `load_weights` does for
    files that are missing or truncated.
    """
    folder = Path(folder)
    config = folder / "config.json"
    shapes = {name: entry.shape for name, entry in entries(folder).items() if not _derived(name)}
    return canonical_shapes(shapes, read_object(config) if config.exists() else {})


def save_weights(
    tensors: Mapping[str, Tensor],
    model: ModelSpec | Mapping[str, Any],
    folder: Path | str,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write canonical tensors and config.json, so that transformers and `load_weights` read them back byte for byte.

    tensors          exactly those of the model, by canonical name, BF16 or FP32 on any device
    model            a spec, or the config dict to write; its dtype entry is set to what is written
    max_shard_bytes  above it, shards and an index are written; a single tensor may exceed it
    The last good checkpoint in the folder stays until the new one is whole; other files are left alone.
    Raises WeightsError and NonFiniteError before anything is written, CheckpointError when the disk refuses.
    """
    folder = Path(folder)
    spec = model if isinstance(model, ModelSpec) else ModelSpec.from_hf_config(model)
    wanted = tensor_shapes(spec)
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}
    known = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
    shapes = {name: {name: tuple(t.shape)} for name, t in tensors.items()}
    _check_names(folder, wanted, shapes, {name: known.get(dtype, dtype) for name, dtype in dtypes.items()})
    ordered = {name: _finite(name, tensors[name]) for name in wanted}
    config = spec.to_hf_config() if isinstance(model, ModelSpec) else dict(model)
    for key in {"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}:
        config[key] = "bfloat16" if set(dtypes.values()) == {"bfloat16"} else "float32"
    write_checkpoint(ordered, config, folder, max_shard_bytes=max_shard_bytes)


def unpack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by canonical name: packed experts (E, 2F, D) and (E, D, F) become views, one per expert and matrix."""
    unpacked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = packed_parts(name, tuple(tensor.shape))
        unpacked |= dict(zip(parts, _experts(tensor, len(parts)), strict=True)) if parts else {name: tensor}
    return unpacked


def pack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `unpack_experts`: `X.experts.gate_up_proj` (E, 2F, D) and `.down_proj` (E, D, F), copied."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        at, found, tail = name.partition(".mlp.experts.")
        if not found:
            packed[name] = tensor
        elif tail == "0.gate_proj.weight":
            num_experts = sum(f"{at}.mlp.experts.{e}.gate_proj.weight" in tensors for e in range(len(tensors)))

            def stack(projection: str, at: str = at, num_experts: int = num_experts) -> Tensor:
                return torch.stack([tensors[f"{at}.mlp.experts.{e}.{projection}.weight"] for e in range(num_experts)])

            packed[f"{at}.mlp.experts.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1)
            packed[f"{at}.mlp.experts.down_proj"] = stack("down_proj")
    return packed


def _experts(packed: Tensor, num_parts: int) -> list[Tensor]:
    """Views of a packed tensor in the order of `packed_parts`."""
    return list(packed.reshape(num_parts, -1, packed.shape[-1]).unbind(0))


def _derived(name: str) -> bool:
    """Buffers that old checkpoints carry and every loader computes itself."""
    return name.endswith(".rotary_emb.inv_freq")


def _check_names(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Mapping[str, tuple[int, ...]]],
    dtypes: Mapping[str, str],
) -> None:
    """WeightsError that lists every kind of disagreement between a model's tensors and those given."""
    source = {name: raw for raw, names in parts.items() for name in names}
    faults = []
    if missing := [name for name in wanted if name not in source]:
        faults.append(f"missing: {some(missing)}")
    if extra := [raw for raw, names in parts.items() if not names.keys() & wanted.keys()]:
        faults.append(f"extra: {some(extra)}")
    given = {name: shape for names in parts.values() for name, shape in names.items()}
    beyond = [name for name in given if name not in wanted and source[name] not in extra]
    if beyond:
        faults.append(f"extra: {some(beyond)}, in {source[beyond[0]]}")
    if wrong := [name for name, shape in given.items() if name in wanted and shape != wanted[name]]:
        faults.append("shape: " + some([f"{n} has {given[n]}, the model needs {wanted[n]}" for n in wrong]))
    if strange := [f"{raw} ({dtypes[raw]})" for raw in parts if dtypes[raw] not in FLOATS]:
        faults.append(f"element type: {some(strange)}; weights must be one of {', '.join(FLOATS)}, convert them first")
    if sum(len(names) for names in parts.values()) != len(source):
        faults.append("twice: experts both packed and one by one")
    if faults:
        raise WeightsError(f"the weights of {folder} do not fit the model; " + "; ".join(faults))


def _finite(name: str, tensor: Tensor) -> Tensor:
    num_bad = tensor.numel() - int(count_true(tensor.isfinite()))
    if num_bad:
        raise NonFiniteError(f"{name} has {num_bad} NaN or Inf among {tensor.numel()} numbers")
    return tensor


def _check_tie(head_VD: Tensor, embedding_VD: Tensor) -> None:
    if head_VD.shape != embedding_VD.shape or not torch.equal(head_VD.float(), embedding_VD.float()):
        raise WeightsError(
            "the config ties lm_head.weight to model.embed_tokens.weight, but the file holds two different tensors, "
            f"{tuple(head_VD.shape)} and {tuple(embedding_VD.shape)}; set tie_word_embeddings to false to keep both"
        )
