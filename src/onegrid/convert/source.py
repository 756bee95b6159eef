"""A checkpoint as it was published: which tensors make up which weight, found through the index, all checked by header.

Weight and scale may lie in different files, gate and up too. Nothing is guessed: a low-bit weight without its scale, a
scale without its weight, two scales for one, a file outside the folder, are errors before any number is read.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from onegrid.convert.by_rows import dequantize_by_rows, require_finite
from onegrid.convert.layouts import CODES, COMPANIONS, GLOBALS, INPUTS, SCALES
from onegrid.convert.stored import (
    SCALE_DTYPES,
    check_scales,
    is_power_of_two,
    quant_tensor,
    read_global,
    read_scales,
)
from onegrid.errors import WeightsError
from onegrid.formats import QUANTIZERS, QuantTensor
from onegrid.model.shards import INDEX, SINGLE, Entry, entries, open_shard, read_object, some
from onegrid.recipe.dialects.foreign import Foreign, read_config
from onegrid.recipe.kinds import layer_of, num_layers_of, packed_parts

FLOATS = ("BF16", "F16", "F32")
_NUMBER = re.compile("[0-9]{1,18}")
_BLOCKS = ("fp8_128x128", "fp8_128x128_fp32")
LEGACY = "hf_quant_config.json"
"""ModelOpt's own configuration file."""
_OPEN_FILES = 3
"""Pages of open files count as memory of this process."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor of a weight lies: a whole key, or the rows of one expert in a packed one."""

    key: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """One canonical tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the plain values or of the codes, as safetensors calls it."""
    codes: Part
    quantizer: str | None = None
    """As declared; None for a plain tensor."""
    scales: Part | None = None
    global_scale: Part | None = None
    sense: str = "multiplier"
    inputs: tuple[str, ...] = ()
    """Keys of static input scales. Plans do not use them; a target layout with a place for one gets it."""

    @property
    def input_sense(self) -> str:
        """ "divisor" for what compressed-tensors calls a global scale, else "multiplier"."""
        return "divisor" if any(key.endswith("input_global_scale") for key in self.inputs) else "multiplier"

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key of the checkpoint that this weight is made of."""
        parts = (self.codes, self.scales, self.global_scale)
        return (*(part.key for part in parts if part is not None), *self.inputs)


@dataclass
class Source:
    """An open checkpoint. `weights` has every tensor by canonical name; the methods read one at a time."""

    folder: Path
    config: dict[str, Any]
    declared: Foreign | None
    entries: dict[str, Entry]
    weights: dict[str, Weight]
    _files: OrderedDict[Path, Any] = field(default_factory=OrderedDict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> logical shape, for `onegrid.recipe.resolve`."""
        return {name: weight.shape for name, weight in self.weights.items()}

    def read(self, name: str) -> QuantTensor | Tensor:
        """A weight as it is stored: codes and scales, or the plain tensor, of any dtype.

        FP8 blocks come as `fp8_128x128` if all their scales are powers of two, else as `fp8_128x128_fp32`, whatever is
        declared. Raises WeightsError for scales that do not fit and NonFiniteError for NaN codes or scales.
        """
        weight = self.weights[name]
        codes = self._part(weight.codes)
        if weight.quantizer is None:
            return codes
        assert weight.scales is not None
        number = None if weight.global_scale is None else self._part(weight.global_scale)
        scales = self._part(weight.scales)
        quantizer = QUANTIZERS[weight.quantizer]
        q = quant_tensor(weight.codes.key, quantizer, codes, scales, number, sense=weight.sense)
        return replace(q, quantizer=QUANTIZERS[_block_quantizer(q.scales)]) if quantizer.name in _BLOCKS else q

    def values(self, name: str) -> Tensor:
        """A weight in BF16: decoded and rounded once, or a plain tensor rounded. NonFiniteError for NaN and Inf."""
        stored = self.read(name)
        if isinstance(stored, QuantTensor):
            return require_finite(name, dequantize_by_rows(stored, torch.bfloat16))
        return require_finite(name, stored.bfloat16())

    def read_input_scale(self, name: str) -> Tensor:
        """The static input scale of a weight that has one, FP32 of shape (). WeightsError if not positive."""
        key = self.weights[name].inputs[0]
        number = self._part(Part(key)).float()
        if number.numel() != 1 or not bool(number.isfinite().all()) or not bool((number > 0).all()):
            raise WeightsError(f"{key} is {number.flatten()[:4].tolist()}; an input scale is one finite number above 0")
        return number.reshape(())

    def stored_quantizers(self) -> dict[str, str | None]:
        """Canonical name -> quantizer the bytes are in. Reads and checks all scales, no codes; errors as for `read`."""
        found = {}
        for name, weight in self.weights.items():
            found[name] = weight.quantizer
            if weight.quantizer is None or weight.scales is None:
                continue
            key, quantizer = weight.codes.key, QUANTIZERS[weight.quantizer]
            rows, columns = weight.shape
            _, values = read_scales(key, quantizer, self._part(weight.scales), (rows, columns))
            number = None if weight.global_scale is None else self._part(weight.global_scale)
            read_global(key, quantizer, number, weight.sense)
            if weight.quantizer in _BLOCKS:
                found[name] = _block_quantizer(values)
        return found

    def close(self) -> None:
        """Let go of the open files."""
        self._files.clear()

    def _part(self, part: Part) -> Tensor:
        path = self.entries[part.key].file
        with self._lock:
            if path not in self._files:
                while len(self._files) >= _OPEN_FILES:
                    self._files.popitem(last=False)
                self._files[path] = open_shard(path)
            self._files.move_to_end(path)
            if part.expert is None:
                return self._files[path].get_tensor(part.key)
            rows = slice(None) if part.rows is None else slice(*part.rows)
            return self._files[path].get_slice(part.key)[part.expert, rows]


def open_source(folder: Path | str) -> Source:
    """A checkpoint folder, checked by its headers: config.json, index, pairs of weights and scales.

    Only safetensors are read: no pickle, no code. Raises WeightsError for files that are missing, truncated or outside
    the folder, names that collide, scales that are missing or unused, and RecipeError for an unknown configuration.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {folder}; a checkpoint is one, with config.json and safetensors files")
    config = read_object(folder / "config.json")
    legacy = read_object(folder / LEGACY) if (folder / LEGACY).exists() else None
    found = entries(folder)
    _check_one(folder)
    if not found:
        raise WeightsError(f"{folder} holds no tensors; a checkpoint has some")
    _check_layers(folder, config, found)
    declared = read_config(config, legacy)
    return Source(folder, config, declared, found, _weights(found, declared))


def _check_one(folder: Path) -> None:
    """WeightsError for a single file beside an index of others: transformers reads that file, vLLM the others."""
    if (folder / SINGLE).exists() and (folder / INDEX).exists():
        listed = read_object(folder / INDEX).get("weight_map")
        others = sorted({str(file) for file in listed.values()} - {SINGLE}) if isinstance(listed, dict) else []
        if others:
            raise WeightsError(
                f"{folder} holds {SINGLE}, and {INDEX} names {some(others)}: which of them counts cannot be known; "
                f"remove {SINGLE} or the index"
            )


def _check_layers(folder: Path, config: Mapping[str, Any], found: Mapping[str, Entry]) -> None:
    """WeightsError where a layer that the configuration counts has no tensor at all."""
    layers = {layer_of(key) for key in found} - {None}
    missing = next((i for i in range(num_layers_of(config)) if i not in layers), None)
    if layers and missing is not None:
        raise WeightsError(
            f"{folder} has num_hidden_layers {num_layers_of(config)} in its config.json, but no tensor of layer "
            f"{missing}; the tensors are of {len(layers)} layers"
        )


def _weights(found: Mapping[str, Entry], declared: Foreign | None) -> dict[str, Weight]:
    """Every canonical tensor, with what it is made of."""
    unused = dict(found)
    weights: dict[str, Weight] = {}

    def take(weight: Weight) -> None:
        if weight.name in weights:
            raise WeightsError(
                f"{weight.name} is there twice: as {weights[weight.name].codes.key} and {weight.codes.key}"
            )
        weights[weight.name] = weight
        for key in weight.keys:
            unused.pop(key, None)

    for key, entry in found.items():
        stem, _, leaf = key.rpartition(".")
        if leaf in COMPANIONS and any(f"{stem}.{codes}" in found for codes in CODES):
            continue
        if packed := packed_parts(key, entry.shape):
            for weight in _packed(key, entry, packed, found, declared):
                take(weight)
        elif leaf in CODES:
            take(_linear(stem, leaf, entry, found, declared))
    for key in list(unused):
        stem, _, leaf = key.rpartition(".")
        owner = next((f"{stem}.{codes}" for codes in CODES if f"{stem}.{codes}" in found), None)
        orphan = leaf in COMPANIONS and (owner is not None or leaf != "scale")  # a parameter may be called "scale"
        if orphan or _scale_of_packed(key, found):
            told = f"{owner} is {found[owner].dtype}" if owner else "there is no weight beside it"
            raise WeightsError(f"{key} is a scale that nothing uses: {told}")
        take(Weight(key, found[key].shape, found[key].dtype, Part(key)))
    return {name: weights[name] for name in sorted(weights, key=natural)}


def _block_quantizer(scales: Tensor) -> str:
    power = scales.dtype == torch.float8_e8m0fnu or is_power_of_two(scales.float())
    return "fp8_128x128" if power else "fp8_128x128_fp32"


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorting key that counts numbers as numbers: layer 2 before layer 10."""
    return tuple((0, int(part)) if _NUMBER.fullmatch(part) else (1, part) for part in name.split("."))


def _linear(stem: str, leaf: str, entry: Entry, found: Mapping[str, Entry], declared: Foreign | None) -> Weight:
    key, name = f"{stem}.{leaf}", f"{stem}.weight"
    if leaf == "weight" and entry.dtype in FLOATS:
        return Weight(name, entry.shape, entry.dtype, Part(key))
    scales = [f"{stem}.{suffix}" for suffix in SCALES if f"{stem}.{suffix}" in found]
    if not scales:
        tried = ", ".join(f"{stem}.{suffix}" for suffix in SCALES)
        raise WeightsError(f"{key} is {entry.dtype} and has no scale: none of {tried} is in the checkpoint")
    if len(scales) > 1:
        raise WeightsError(f"{key} has {len(scales)} scales, {', '.join(scales)}; which one counts cannot be known")
    quantizer = _declared(stem, key, entry, declared)
    numbers = [f"{stem}.{suffix}" for suffix in GLOBALS if f"{stem}.{suffix}" in found]
    if QUANTIZERS[quantizer].has_amax != (len(numbers) == 1):
        wanted = " or ".join(f"{stem}.{suffix}" for suffix in GLOBALS)
        told = f"{', '.join(numbers)} are there" if numbers else "it is not in the checkpoint"
        need = f"needs one global scale, {wanted}" if QUANTIZERS[quantizer].has_amax else "has no global scale"
        raise WeightsError(f"{key} is in {quantizer}, which {need}; {told}")
    inputs = tuple(f"{stem}.{suffix}" for suffix in INPUTS if f"{stem}.{suffix}" in found)
    columns = entry.shape[-1] * (2 if QUANTIZERS[quantizer].fmt.bits == 4 else 1) if entry.shape else 0
    scale, kind = found[scales[0]], SCALE_DTYPES[QUANTIZERS[quantizer].scale]
    if scale.dtype not in kind:
        raise WeightsError(
            f"the scales of {key} have dtype {scale.dtype}; those of {quantizer} are {' or '.join(kind)}"
        )
    check_scales(key, QUANTIZERS[quantizer], scale.shape, (entry.shape[0], columns))
    return Weight(
        name,
        (*entry.shape[:-1], columns),
        entry.dtype,
        Part(key),
        quantizer,
        Part(scales[0]),
        Part(numbers[0]) if numbers else None,
        GLOBALS[numbers[0].rpartition(".")[2]] if numbers else "multiplier",
        inputs,
    )


def _declared(stem: str, key: str, entry: Entry, declared: Foreign | None) -> str:
    """The quantizer that the configuration gives a module; never one guessed from bytes."""
    if declared is None:
        raise WeightsError(f"{key} is {entry.dtype}, and the checkpoint's configuration says nothing of quantization")
    group = declared.group_of(stem)
    if group is None:
        raise WeightsError(f"{key} is {entry.dtype}, and no group of the configuration names {stem}")
    bits = QUANTIZERS[group.weight].fmt.bits
    if len(entry.shape) != 2 or entry.dtype != ("U8" if bits == 4 else "F8_E4M3"):
        raise WeightsError(
            f"{key} is {entry.dtype} {entry.shape}; {declared.method} {group.scheme.token} weights are "
            f"{'U8' if bits == 4 else 'F8_E4M3'} with two axes"
        )
    return group.weight


def _packed(
    key: str, entry: Entry, parts: dict[str, tuple[int, ...]], found: Mapping[str, Entry], declared: Foreign | None
) -> list[Weight]:
    """The experts of a packed tensor [E, 2F, D] or [E, D, F], whose FP8 scales are packed the same way."""
    num_experts, per_expert = entry.shape[0], len(parts) // entry.shape[0]
    scale_key = _packed_scale(key, found)
    weights = []
    for i, (name, shape) in enumerate(parts.items()):
        expert, half = divmod(i, per_expert)
        codes = Part(key, expert, (half * shape[0], (half + 1) * shape[0]))
        if entry.dtype in FLOATS:
            weights.append(Weight(name, shape, entry.dtype, codes))
            continue
        if scale_key is None:
            raise WeightsError(f"{key} is {entry.dtype} and has no scale: {key}_scale_inv is not in the checkpoint")
        stem = name.removesuffix(".weight")
        quantizer = _declared(stem, key, Entry(entry.file, shape, entry.dtype), declared)
        height = QUANTIZERS[quantizer].block[0] or shape[0]
        if QUANTIZERS[quantizer].has_amax or shape[0] % height or len(found[scale_key].shape) != 3:
            raise WeightsError(f"{key}: packed experts in {quantizer} with {shape[0]} rows cannot be taken apart")
        rows = shape[0] // height
        scales = Part(scale_key, expert, (half * rows, (half + 1) * rows))
        weights.append(Weight(name, shape, entry.dtype, codes, quantizer, scales))
    assert len(weights) == num_experts * per_expert
    return weights


def _packed_scale(key: str, found: Mapping[str, Entry]) -> str | None:
    stem = key.removesuffix(".weight")
    names = (f"{stem}_scale_inv", f"{stem}_scale", f"{stem}.weight_scale_inv", f"{stem}.weight_scale")
    return next((name for name in names if name in found), None)


def _scale_of_packed(key: str, found: Mapping[str, Entry]) -> bool:
    stem = key.removesuffix("_scale_inv").removesuffix("_scale")
    return stem != key and stem in found
