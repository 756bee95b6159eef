"""A trained policy as a Hugging Face folder: what transformers, engines and `onegrid` itself can open."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from onegrid.errors import CheckpointError, WeightsError
from onegrid.model.shards import inside, read_object
from onegrid.model.weights import save_weights

SIDE_FILES = (
    "characters.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
"""Tokenizer and generation settings come along as they are."""


def export_weights(masters: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write weights in BF16 into a new folder, with everything else from the folder that training began with.

    masters  canonical name -> FP32; rounded once to BF16, the very numbers that learner and sampler quantize
    source   folder with config.json and tokenizer
    Raises WeightsError if the target is not empty or tensors do not fit the model, CheckpointError for a full disk.
    """
    if target.is_file():
        raise WeightsError(f"{target} is a file; export into a new folder")
    if target.exists() and any(target.iterdir()):
        raise WeightsError(f"{target} is not empty; export into a new folder")
    config = read_object(source / "config.json")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in SIDE_FILES:
            if (source / name).exists():
                shutil.copyfile(inside(source, name), target / name)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    save_weights({name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}, config, target)
