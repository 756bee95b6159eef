"""A Llama checkpoint widened with zeros until every dimension is a multiple of 128, as some kernels ask.

    python benchmarks/padded.py CHECKPOINT TARGET

The function stays: new channels are 0 in every layer, new heads have queries, keys and values of 0 and columns of 0
behind them. A wider RMSNorm divides by more channels, which its weight and epsilon take back; the weight is rounded to
BF16 once more, so log-probabilities move by about that.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import load_weights, save_weights

UNIT = 128


def up(size: int, unit: int = UNIT) -> int:
    """The next multiple."""
    return -(-size // unit) * unit


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the wider model; groups of heads stay whole."""
    hidden, width = config["hidden_size"], config["head_dim"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    groups = config["num_key_value_heads"]
    while groups * width % UNIT or groups * group * width % UNIT:
        groups += 1
    wide = up(hidden, math.lcm(UNIT, groups * group))  # configurations of Llama ask for a multiple of the heads
    return config | {
        "hidden_size": wide,
        "intermediate_size": up(config["intermediate_size"]),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * group,
        "rms_norm_eps": config["rms_norm_eps"] * hidden / wide,
    }


def padded(tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], hidden: int) -> dict[str, Tensor]:
    """Every tensor in the corner of a larger one of zeros; norms scaled by sqrt(old / new) channels."""
    out = {}
    for name, shape in shapes.items():
        x = tensors[name].float()
        if x.dim() == 1 and shape != x.shape:
            x = x * (hidden / shape[0]) ** 0.5
        wide = torch.zeros(shape)
        wide[tuple(slice(0, n) for n in x.shape)] = x
        out[name] = wide.to(torch.bfloat16)
    return out


def main() -> None:
    """Reads one folder and writes the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    source, target = args.checkpoint, args.target
    config = json.loads((source / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    wide = widened(config)
    tensors = load_weights(source, ModelSpec.from_hf_config(config))
    shapes = tensor_shapes(ModelSpec.from_hf_config(wide))
    target.mkdir(parents=True, exist_ok=True)
    save_weights(padded(tensors, shapes, config["hidden_size"]), wide, target)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not (target / file.name).exists():
            shutil.copy(file, target / file.name)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    print({key: (config[key], wide[key]) for key in sizes})


if __name__ == "__main__":
    main()
