"""Adapters in and out, in the files of PEFT: adapter_model.safetensors and adapter_config.json.

Experts stand one by one under their canonical names; PEFT turns them into the stacked parameters of transformers 5 when
it loads them, for which it wants gate_proj and up_proj of experts together.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CheckpointError, NonFiniteError, WeightsError
from onegrid.learner.config import LoraConfig
from onegrid.learner.lora import Adapters
from onegrid.model.shards import open_shard, some
from onegrid.model.spec import ModelSpec

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
UNSUPPORTED = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "target_parameters": None,
}
"""Keys of PEFT that change what an adapter means, with the one value that is understood (absent is the same)."""


def adapters_of(config: LoraConfig, spec: ModelSpec, masters: Mapping[str, Tensor]) -> Adapters:
    """New adapters, or those of `config.adapter`. Raises what `Adapters` and `read_adapter` raise."""
    start = read_adapter(Path(config.adapter), config) if config.adapter else None
    return Adapters(config, spec, masters, start=start)


def write_adapter(adapters: Adapters, base: str, target: Path) -> None:
    """Write factors (FP32) and their configuration as a new folder that `peft.PeftModel.from_pretrained` opens.

    base  name or folder of the base model, noted in the configuration
    Raises WeightsError if the target is not empty, CheckpointError if the disk refuses; nothing half-written stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if target.is_file() or (target.exists() and any(target.iterdir())):
        raise WeightsError(f"{target} is not empty; export into a new folder")
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    tensors = {f"{PREFIX}{name}.weight": t.cpu().contiguous() for name, t in adapters.tensors().items()}
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(peft_config(adapters, base), indent=2, sort_keys=True)
        (partial / CONFIG).write_text(text + "\n", encoding="utf-8")
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write the adapter to {target}: {error}") from error


def peft_config(adapters: Adapters, base: str) -> dict[str, Any]:
    """What PEFT calls the configuration of an adapter; "all-linear" is spelled out."""
    leaves = {name.rpartition(".")[2] for names in adapters.names.values() for name in names}
    spelled = set(adapters.config.targets) - {"all-linear"}
    targets = sorted(leaves if "all-linear" in adapters.config.targets else spelled)
    alpha = adapters.config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "init_lora_weights": True,
        "inference_mode": True,
        **{
            key: value
            for key, value in UNSUPPORTED.items()
            if key in ("bias", "fan_in_fan_out", "use_dora", "use_rslora")
        },
    }


def read_adapter(folder: Path, config: LoraConfig) -> dict[str, Tensor]:
    """Factors, FP32 on the CPU, by canonical module: "model.layers.0.self_attn.q_proj.lora_A".

    config  rank and alpha that the run states; the files must say the same
    Raises WeightsError for files that are missing, damaged, of another kind or of another rank, NonFiniteError for NaN
    or Inf.
    """
    try:
        told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"learner.lora.adapter: cannot read {folder / CONFIG}: {error}") from error
    if not isinstance(told, dict) or told.get("peft_type") != "LORA":
        raise WeightsError(f"{folder / CONFIG} does not describe a LoRA adapter")
    for key, understood in UNSUPPORTED.items():
        if (told.get(key) or understood) != understood:
            raise WeightsError(f"{folder / CONFIG} has {key} = {told[key]!r}; only {understood!r} is understood")
    for key, ours, name in (("r", config.rank, "rank"), ("lora_alpha", config.alpha, "alpha")):
        if told.get(key) != ours:
            raise WeightsError(
                f"{folder / CONFIG} has {key} = {told.get(key)!r}, but learner.lora.{name} is {ours}; write the same"
            )
    with open_shard(folder / WEIGHTS) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    strange = [n for n in stored if not (n.startswith(PREFIX) and n.endswith((".lora_A.weight", ".lora_B.weight")))]
    fused = [n for n in stored if ".experts.lora_" in n or ".experts.base_layer." in n]
    if strange or fused:
        raise WeightsError(
            f"{folder / WEIGHTS} has factors that are not those of one linear each: {some(strange + fused)}"
            + ("; experts must stand one by one, not stacked as transformers 5 has them" if fused else "")
        )
    factors = {n.removeprefix(PREFIX).removesuffix(".weight"): t.float() for n, t in stored.items()}
    refuse_non_finite(factors)
    return factors


def refuse_non_finite(factors: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError for the first factor with NaN or Inf."""
    for name, factor in factors.items():
        bad = int((~torch.isfinite(factor)).sum())
        if bad:
            raise NonFiniteError(f"{name} of the adapter: {bad} of {factor.numel()} values are NaN or Inf")
