"""What a conversion will write, from headers alone: plan, files, configuration, and where every source key goes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from torch import equal as same

from onegrid.convert.layouts import Layout, holders, layout_for, scale_shape
from onegrid.convert.shard_files import DTYPES, ShardFile, Slot, index_of, plan_files
from onegrid.convert.source import Source
from onegrid.convert.weights import check_shape
from onegrid.errors import RecipeError, WeightsError
from onegrid.formats import QUANTIZERS
from onegrid.model.shards import INDEX, some
from onegrid.recipe import Plan, Recipe, resolve
from onegrid.recipe.dialects.export import export
from onegrid.recipe.dialects.schemes import METHODS, scheme_for
from onegrid.recipe.kinds import text_config

RECORD = "conversion.json"
"""Stands beside the weights and says what they are: recipe, layout, digest of the plan, what went where."""
_DIALECT = {"sglang": "mxfp8"}


@dataclass(frozen=True, slots=True)
class Work:
    """All that is known before the first number is read."""

    source: Source
    plan: Plan
    rows: dict[str, Layout]
    files: list[ShardFile]
    texts: dict[str, str]
    """Small files by name: config, index, record."""
    dropped: dict[str, str]
    notes: tuple[str, ...]


def prepare(source: Source, recipe: Recipe, layout: str | None, max_shard_bytes: int) -> Work:
    """Plan and files of a conversion. Raises before anything is written: see `convert`."""
    plan = resolve(recipe, source.config, source.shapes())
    quantized = [t for t in plan.tensors.values() if t.sampler_weight is not None]
    if quantized and layout is None:
        able = holders({t.name: (str(t.sampler_weight), t.sampler_activation) for t in quantized})
        raise RecipeError(
            f"recipe {recipe.name!r} quantizes {len(quantized)} tensors, and no layout is given (--layout); "
            f"layouts that hold it: {', '.join(able) or 'none, change the recipe'}"
        )
    rows = {t.name: layout_for(str(layout), str(t.sampler_weight), t.sampler_activation) for t in quantized}
    if any(row.one_global and QUANTIZERS[str(plan[n].sampler_weight)].span == "tensor" for n, row in rows.items()):
        plan = resolve(replace(recipe, share_qkv_amax=True), source.config, source.shapes())
    targets = {name: _slots(source, plan, name, rows.get(name)) for name in source.weights if name in plan.tensors}
    keys = [key for slots in targets.values() for key in slots]
    if len(set(keys)) < len(keys):
        raise WeightsError(f"two tensors would be written as {some([key for key in keys if keys.count(key) > 1])}")
    files = plan_files(targets, max_shard_bytes=max_shard_bytes)
    dropped = _dropped(source, plan, targets)
    notes = _notes(plan, layout)
    texts = _texts(source, plan, layout, files, rows, dropped, notes)
    return Work(source, plan, rows, files, texts, dropped, notes)


def _slots(source: Source, plan: Plan, name: str, row: Layout | None) -> dict[str, Slot]:
    """The tensors that a weight will be."""
    weight = source.weights[name]
    if row is None:
        dtype = weight.dtype if weight.quantizer is None else "BF16"
        if dtype not in DTYPES:
            raise WeightsError(f"{name} is {dtype}; known element types: {', '.join(DTYPES)}")
        return {name: Slot(dtype, weight.shape)}
    check_shape(name, weight.shape, row)
    stem = name.removesuffix(".weight")
    quantizer = QUANTIZERS[str(plan[name].sampler_weight)]
    rows, columns = weight.shape
    numbers = (1,) if row.method == "compressed-tensors" else ()
    slots = {
        row.codes: Slot("U8", (rows, columns // 2)) if row.packed else Slot("F8_E4M3", (rows, columns)),
        row.scales: Slot(row.scales_dtype, scale_shape(row, weight.shape, quantizer)),
    }
    slots |= {suffix: Slot("F32", numbers) for suffix in (row.global_scale, row.input_scale) if suffix is not None}
    return {f"{stem}.{suffix}": slot for suffix, slot in slots.items()}


def _dropped(source: Source, plan: Plan, targets: dict[str, dict[str, Slot]]) -> dict[str, str]:
    """Every source key without namesake in the target, explained. WeightsError for one that cannot be."""
    written = {key for slots in targets.values() for key in slots}
    told: dict[str, str] = {}
    for name, weight in source.weights.items():
        for key in weight.keys:
            if key in written:
                continue
            if name in targets:
                into = ", ".join(targets[name])
                told[key] = told.get(key, "") + ("; " if key in told else "") + f"in {into}"
                if key in weight.inputs:
                    told[key] = "static scale of the input; the recipe quantizes inputs as they come"
            else:
                told[key] = _tied(source, name)
    return told


def _tied(source: Source, name: str) -> str:
    """Why a weight that the plan does not have may go: it is the tied head, and really the embedding."""
    text = text_config(source.config)
    tied = text.get("tie_word_embeddings", source.config.get("tie_word_embeddings", False))
    embedding = next((n for n in source.weights if n.endswith("embed_tokens.weight") and "mtp" not in n), None)
    if name != "lm_head.weight" or not tied or embedding is None:
        raise WeightsError(f"{name} is in the source and not in the plan; nothing may be dropped without a reason")
    head_VD, embedding_VD = source.values(name), source.values(embedding)
    if head_VD.shape != embedding_VD.shape or not same(head_VD, embedding_VD):
        raise WeightsError(
            f"the config ties {name} to {embedding}, but the file holds two different tensors; "
            f"set tie_word_embeddings to false to keep both"
        )
    return f"tied to {embedding}, with the same numbers"


def extra_tensors(plan: Plan) -> tuple[str, ...]:
    """Linears of layers and heads beyond the main model (MTP)."""
    return tuple(t.name for t in plan.tensors.values() if t.kind == "extra")


def _notes(plan: Plan, layout: str | None) -> tuple[str, ...]:
    notes: dict[str, None] = {}
    for t in plan.tensors.values():
        if t.sampler_weight is not None:
            scheme = scheme_for(METHODS[str(layout)], t.sampler_weight, t.sampler_activation)
            notes |= {scheme.note: None} if scheme.note else {}
            height, width = QUANTIZERS[t.sampler_weight].block
            if ((height or 1) > 1 and t.shape[0] % int(height or 1)) or (width and t.shape[1] % width):
                notes[f"{t.name} has blocks at its edge ({t.shape[0]} x {t.shape[1]}); not every engine takes them"] = (
                    None
                )
    return tuple(notes)


def _texts(
    source: Source,
    plan: Plan,
    layout: str | None,
    files: list[ShardFile],
    rows: dict[str, Layout],
    dropped: dict[str, str],
    notes: tuple[str, ...],
) -> dict[str, str]:
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "compression_config")}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    said: dict[str, Any] = export(plan, _DIALECT.get(str(layout), str(layout))) if rows else {}
    if "quantization_config" in said:
        config["quantization_config"] = said["quantization_config"]
    record = {
        "recipe": plan.recipe_name,
        "layout": layout,
        "plan_digest": plan.digest,
        "quantized": {n: sum(t.sampler_weight == n for t in plan.tensors.values()) for n in sorted(_used(plan))},
        "extra": list(extra_tensors(plan)),
        "dropped": dropped,
        "notes": list(notes),
    }
    texts = {"config.json": _json(config), RECORD: _json(record)}
    if "hf_quant_config" in said:
        texts["hf_quant_config.json"] = _json(said["hf_quant_config"])
    if len(files) > 1:
        texts[INDEX] = _json(index_of(files))
    return texts


def _used(plan: Plan) -> set[str]:
    return {t.sampler_weight for t in plan.tensors.values() if t.sampler_weight is not None}


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def identity_of(work: Work, layout: str | None, max_shard_bytes: int) -> str:
    """What must be the same for files of an earlier attempt to be used again."""
    files = {entry.file for entry in work.source.entries.values()}
    told = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
    headers = [hashlib.sha256(file.header).hexdigest() for file in work.files]
    text = json.dumps([told, headers, work.plan.digest, layout, max_shard_bytes, sorted(work.texts.items())])
    return hashlib.sha256(text.encode()).hexdigest()
