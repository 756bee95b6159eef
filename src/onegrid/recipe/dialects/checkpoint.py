"""Quantization configurations of checkpoints: DeepSeek's `fp8`, SGLang's `mxfp8`, ModelOpt, compressed-tensors.

Each writer checks its own list with the matchers of the engines that read it: what they would read is what the plan
means, module by module, or there is an error and no configuration.
"""

from __future__ import annotations

from typing import Any

from onegrid.errors import RecipeError
from onegrid.recipe.dialects.matchers import MATCHERS, READERS
from onegrid.recipe.dialects.modules import Module, excluded_names, modules_of
from onegrid.recipe.dialects.schemes import Scheme, schemes_of
from onegrid.recipe.plan import Plan

Config = dict[str, Any]


def fp8_config(plan: Plan) -> Config:
    """`quant_method` "fp8": blocks of 128 x 128, or one scale a tensor; inputs are quantized as they come."""
    scheme = _only_scheme(plan, "fp8")
    excluded = _checked(plan, "fp8")
    config: Config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if scheme.token == "block":
        config["weight_block_size"] = [128, 128]
        if _power_of_two(plan):
            config["scale_fmt"] = "ue8m0"
    return config | {"modules_to_not_convert": excluded}


def mxfp8_config(plan: Plan) -> Config:
    """`quant_method` "mxfp8", which SGLang reads natively."""
    _only_scheme(plan, "mxfp8")
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": _checked(plan, "mxfp8"),
    }


_GROUP_SIZE = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32, "FP8_PB_WO": 128}
_BITS = {"NVFP4": 4, "W4A16_NVFP4": 4}


def modelopt_config(plan: Plan) -> Config:
    """ModelOpt's flat form, for `config.json`. `modelopt_legacy` makes the nested file of it."""
    schemes = schemes_of(plan, "modelopt")
    algos = _distinct(schemes)
    algo = algos[0] if len(algos) == 1 else "MIXED_PRECISION"
    groups = {
        f"group_{i}": {
            "weights": _modelopt_numbers(name) | {"dynamic": False},
            "input_activations": None if name.startswith("W4A16") else _modelopt_numbers(name) | {"dynamic": False},
            "targets": ["Linear"] if len(algos) == 1 else _shards_of(plan, schemes, name),
        }
        for i, name in enumerate(algos)
    }
    config: Config = {"quant_method": "modelopt", "quant_algo": algo, "config_groups": groups}
    if algo in _GROUP_SIZE:
        config["group_size"] = _GROUP_SIZE[algo]
    if algo == "MIXED_PRECISION":
        config["quantized_layers"] = {
            shard: {"quant_algo": name} | ({"group_size": _GROUP_SIZE[name]} if name in _GROUP_SIZE else {})
            for name in algos
            for shard in _shards_of(plan, schemes, name)
        }
    if plan.kv_cache == "fp8":
        config["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "dynamic": False}
    return config | {"ignore": _checked(plan, "modelopt"), "producer": {"name": "modelopt", "version": "0.39.0"}}


def modelopt_legacy(config: Config) -> Config:
    """The nested form, `hf_quant_config.json`, of a flat one."""
    inner: Config = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": None}
    if "kv_cache_scheme" in config:
        inner["kv_cache_quant_algo"] = "FP8"
    for key in ("group_size", "quantized_layers"):
        if key in config:
            inner[key] = config[key]
    return {"producer": config["producer"], "quantization": inner | {"exclude_modules": list(config["ignore"])}}


def _modelopt_numbers(algo: str) -> Config:
    numbers: Config = {"num_bits": _BITS.get(algo, 8), "type": "float"}
    return numbers | ({"group_size": _GROUP_SIZE[algo]} if algo in _GROUP_SIZE else {})


def compressed_tensors_config(plan: Plan) -> Config:
    """compressed-tensors: a group for each pair of weight and input; one targets "Linear", several name modules."""
    schemes = schemes_of(plan, "compressed-tensors")
    pairs: dict[tuple[str, str | None], list[Module]] = {}
    for module in modules_of(plan):
        if module.weight is not None:
            pairs.setdefault((schemes[module.name].token, module.activation), []).append(module)
    _distinct(schemes)
    formats = list(dict.fromkeys(token.partition("/")[0] for token, _ in pairs))
    groups = {}
    for i, ((token, activation), members) in enumerate(pairs.items()):
        fmt, _, granularity = token.partition("/")
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(pairs) == 1 else [shard for m in members for shard in m.shards],
            "weights": _ct_weights(fmt, granularity),
            "input_activations": None if activation is None else _ct_inputs(fmt, granularity, activation),
            "output_activations": None,
            "format": fmt,
        }
    config: Config = {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _checked(plan, "compressed-tensors"),
    }
    if plan.kv_cache == "fp8":
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        config["kv_cache_scheme"] = scheme
    return config


def _ct_weights(fmt: str, granularity: str) -> Config:
    numbers: Config = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if fmt == "nvfp4-pack-quantized":
        return numbers | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    if fmt in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        bits = 4 if fmt.startswith("mxfp4") else 8
        return numbers | {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    block = {"block_structure": [128, 128]} if granularity == "block" else {}
    return numbers | {"strategy": granularity} | block


def _ct_inputs(fmt: str, granularity: str, activation: str) -> Config:
    numbers: Config = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    if fmt == "nvfp4-pack-quantized":
        return numbers | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    if fmt in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        bits = 4 if activation == "mxfp4" else 8
        return numbers | {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    if granularity == "block":
        return numbers | {"strategy": "group", "group_size": 128}
    return numbers | {"strategy": "token" if granularity == "channel" else "tensor"}


def _only_scheme(plan: Plan, method: str) -> Scheme:
    schemes = schemes_of(plan, method)
    tokens = _distinct(schemes)
    if len(tokens) != 1:
        raise RecipeError(
            f"{method!r} declares one format for the whole model, the plan has {', '.join(tokens) or 'none'}; "
            f"compressed-tensors and modelopt hold several"
        )
    return next(iter(schemes.values()))


def _distinct(schemes: dict[str, Scheme]) -> list[str]:
    tokens = list(dict.fromkeys(scheme.token for scheme in schemes.values()))
    if not tokens:
        raise RecipeError("the plan quantizes nothing; a BF16 checkpoint has no quantization configuration")
    return tokens


def _shards_of(plan: Plan, schemes: dict[str, Scheme], token: str) -> list[str]:
    return [shard for m in modules_of(plan) if m.weight and schemes[m.name].token == token for shard in m.shards]


def _power_of_two(plan: Plan) -> bool:
    from onegrid.formats import QUANTIZERS

    names = {n for m in modules_of(plan) for n in (m.weight, m.activation) if n is not None}
    powers = {QUANTIZERS[name].pow2 for name in names}
    if len(powers) > 1:
        raise RecipeError(f"'fp8' declares one kind of scale for weights and inputs; the plan mixes {sorted(names)}")
    return powers == {True}


def _checked(plan: Plan, method: str) -> list[str]:
    """The portable exclusion list, after every engine that reads it has been found to read the plan out of it."""
    entries = _whole_parents(plan) if method == "modelopt" else excluded_names(plan)
    for reader in READERS[method]:
        for module in modules_of(plan):
            if MATCHERS[reader](entries, module) != (module.weight is None):
                raise RecipeError(
                    f"{reader} would {'' if module.weight else 'not '}keep {module.name} in BF16, against the plan; "
                    f"no list of full names can say it: make a rule that treats it like its neighbours"
                )
    return entries


_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def _whole_parents(plan: Plan) -> list[str]:
    """The portable list, with `X.self_attn.*` for latent projections where all of X.self_attn stays in BF16.

    SGLang takes the last component of an entry for one of these four and applies it to every layer, so the full name of
    one layer's projection would take all the others out too.
    """
    quantized = {shard.rpartition(".")[0] for m in modules_of(plan) if m.weight for shard in m.shards}
    entries: dict[str, None] = {}
    for name in excluded_names(plan):
        parent, _, last = name.rpartition(".")
        entries[f"{parent}.*" if last in _LATENT and parent not in quantized else name] = None
    return list(entries)
