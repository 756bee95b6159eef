"""Reading the quantization configuration of a foreign checkpoint: which module is said to be in what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onegrid.errors import RecipeError
from onegrid.recipe.dialects.matchers import MATCHERS, matched_from_start
from onegrid.recipe.dialects.modules import Module
from onegrid.recipe.dialects.schemes import SCHEMES, Scheme


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that are declared alike."""

    targets: tuple[str, ...] | None
    """Module names and `re:` expressions; None for every linear."""
    scheme: Scheme
    weight: str
    """Quantizer that the weight is said to be in."""
    activations: tuple[str | None, ...]
    """Quantizers of the input that the declaration may stand for."""
    _names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", frozenset(self.targets or ()))

    def holds(self, name: str) -> bool:
        """Whether an unfused module name is among the targets."""
        if self.targets is None or name in self._names:
            return True
        return any(matched_from_start(t[3:], name) for t in self.targets if t.startswith("re:"))


@dataclass(frozen=True, slots=True)
class Foreign:
    """The declaration of one checkpoint."""

    method: str
    groups: tuple[Group, ...]
    excluded: tuple[str, ...]
    """As written, to be read by an engine's matcher."""
    kv_cache: str
    """ "bf16" or "fp8"."""

    def group_of(self, name: str) -> Group | None:
        """What a module that is quantized is in, by its unfused name; exclusions are not looked at."""
        return next((group for group in self.groups if group.holds(name)), None)

    def read_by(self, engine: str, module: Module) -> Group | None:
        """What one engine makes of a module; None where it would leave it in BF16.

        engine  a key of MATCHERS
        Raises RecipeError where that engine would refuse: some shards listed and others not, or in different groups.
        """
        if MATCHERS[engine](self.excluded, module):
            return None
        if module.kind == "head" and self.method != "modelopt" and all(g.targets is None for g in self.groups):
            return None
        groups = {id(group): group for group in map(self.group_of, module.shards)}
        if len(groups) > 1:
            raise RecipeError(f"shards of {module.name} are declared in {len(groups)} ways; engines want one")
        return next(iter(groups.values()))


def read_config(config: Mapping[str, Any], legacy: Mapping[str, Any] | None = None) -> Foreign | None:
    """The declaration in a model's config.json, or in ModelOpt's hf_quant_config.json where that has none.

    Returns None for a checkpoint that says nothing. Raises RecipeError, naming what it met, for a method or format that
    is not known here: nothing is guessed.
    """
    found = _object(config, "quantization_config") or _object(_object(config, "text_config"), "quantization_config")
    found = found or _object(config, "compression_config")
    if not found and legacy:
        found = {"quant_method": "modelopt", **legacy}
    if not found:
        return None
    method = str(found.get("quant_method", "modelopt" if "quantization" in found else "")).lower()
    if method.startswith("modelopt"):
        return _modelopt(found)
    readers = {"fp8": _fp8, "mxfp8": _mxfp8, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise RecipeError(f"quant_method {method!r} is not known; known: {', '.join([*readers, 'modelopt'])}")
    return readers[method](found)


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands under a key; {} for nothing. RecipeError for anything but an object."""
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise RecipeError(f"{key} is {str(found)[:80]!r}; it must be an object")
    return found or {}


def _scheme(method: str, token: str) -> Scheme:
    for scheme in SCHEMES:
        if scheme.method == method and scheme.token == token:
            return scheme
    known = ", ".join(s.token for s in SCHEMES if s.method == method)
    raise RecipeError(f"{method!r} declares {token!r}, which is not known; known: {known}")


def _group(scheme: Scheme, *, pow2: bool = False, targets: tuple[str, ...] | None = None) -> Group:
    weight = "fp8_128x128" if pow2 and "fp8_128x128" in scheme.weights else scheme.weights[0]
    activations = ("fp8_1x128",) if pow2 and "fp8_1x128" in scheme.activations else scheme.activations
    return Group(targets, scheme, weight, activations)


def _excluded(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    for key in keys:
        entries = config.get(key)
        if entries:
            return _names(key, entries)
    return ()


def _names(key: str, entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(e, str) for e in entries):
        raise RecipeError(f"{key} is {str(entries)[:80]!r}; it must be a list of names")
    return tuple(entries)


def _fp8(config: Mapping[str, Any]) -> Foreign:
    block = config.get("weight_block_size")
    if block not in (None, [128, 128], (128, 128)):
        raise RecipeError(f"weight_block_size {block!r} is not known for 'fp8'; 128 x 128 is")
    scheme = _scheme("fp8", "tensor" if block is None else "block")
    group = _group(scheme, pow2=config.get("scale_fmt") == "ue8m0")
    if group.weight == "fp8_128x128_fp32":
        group = replace(group, activations=("fp8_1x128_fp32",))
    return Foreign("fp8", (group,), _excluded(config, "ignored_layers", "modules_to_not_convert"), "bf16")


def _mxfp8(config: Mapping[str, Any]) -> Foreign:
    group = _group(_scheme("mxfp8", "mxfp8"))
    return Foreign("mxfp8", (group,), _excluded(config, "ignored_layers", "modules_to_not_convert"), "bf16")


def _modelopt(config: Mapping[str, Any]) -> Foreign:
    inner = _object(config, "quantization") or config
    algo = str(inner.get("quant_algo") or "").upper()
    if algo == "MIXED_PRECISION":
        layers = _object(inner, "quantized_layers")
        algos = {name: str(_object(layers, name).get("quant_algo")).upper() for name in layers}
        groups = _merged([_group(_scheme("modelopt", algo), targets=(name,)) for name, algo in algos.items()])
    else:
        declared = _object(config, "config_groups")
        inputs = [_object(declared, name).get("input_activations") for name in declared]
        weight_only = algo == "NVFP4" and inputs and not any(inputs)
        groups = [_group(_scheme("modelopt", "W4A16_NVFP4" if weight_only else algo))]
    excluded = _excluded(inner, "ignore", "modules_to_not_convert", "exclude_modules")
    fp8_cache = str(inner.get("kv_cache_quant_algo") or "").upper() == "FP8" or bool(inner.get("kv_cache_scheme"))
    return Foreign("modelopt", tuple(groups), excluded, "fp8" if fp8_cache else "bf16")


def _merged(groups: list[Group]) -> list[Group]:
    """One group for each scheme, so that shards of one format compare as one."""
    targets: dict[str, list[str]] = {}
    for group in groups:
        targets.setdefault(group.scheme.token, []).extend(group.targets or ())
    return [_group(_scheme("modelopt", token), targets=tuple(names)) for token, names in targets.items()]


def _compressed_tensors(config: Mapping[str, Any]) -> Foreign:
    groups = []
    for name, entry in _object(config, "config_groups").items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("weights"), Mapping):
            raise RecipeError(f"compressed-tensors: group {name!r} has no weights; embeddings and caches are not known")
        scheme = _scheme("compressed-tensors", _ct_token(entry["weights"]))
        inputs = _object(entry, "input_activations")
        targets = _names("targets", entry.get("targets") or [])
        every = None if "Linear" in targets else targets
        group = _group(scheme, targets=every)
        groups.append(Group(every, scheme, group.weight, _ct_inputs(scheme, inputs)))
    if not groups:
        raise RecipeError("compressed-tensors: config_groups is empty")
    kv_cache = "fp8" if config.get("kv_cache_scheme") else "bf16"
    return Foreign("compressed-tensors", tuple(groups), _excluded(config, "ignore"), kv_cache)


def _ct_token(weights: Mapping[str, Any]) -> str:
    bits, strategy, size = (weights.get(key) for key in ("num_bits", "strategy", "group_size"))
    uint8 = str(weights.get("scale_dtype")).removeprefix("torch.") in ("uint8", "float8_e8m0fnu")
    if weights.get("type") == "float":
        if (bits, strategy, size) == (4, "tensor_group", 16):
            return "nvfp4-pack-quantized"
        if (bits, strategy, size) == (4, "group", 32):
            return "mxfp4-pack-quantized"
        if (bits, strategy, size, uint8) == (8, "group", 32, True):
            return "mxfp8-quantized"
        if bits == 8 and strategy == "block" and weights.get("block_structure") in ([128, 128], (128, 128)):
            return "float-quantized/block"
        if bits == 8 and strategy in ("channel", "tensor"):
            return f"float-quantized/{strategy}"
    told = {key: weights.get(key) for key in ("type", "num_bits", "strategy", "group_size", "block_structure")}
    raise RecipeError(f"compressed-tensors: weights {told} are in no format that is known here")


def _ct_inputs(scheme: Scheme, inputs: Mapping[str, Any] | None) -> tuple[str | None, ...]:
    if not inputs:
        return (None,)
    quantized = tuple(name for name in scheme.activations if name is not None)
    if scheme.token == "mxfp4-pack-quantized":
        return ("mxfp4",) if inputs.get("num_bits") == 4 else ("mxfp8",)
    return quantized
