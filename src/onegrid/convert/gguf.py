"""A GGUF file as a Hugging Face checkpoint: config.json, BF16 safetensors, tokenizer and generation settings.

Tensors are decoded one at a time by the ecosystem's reader (the only file that knows it), so that memory stays that of
the largest tensor. What is stored as 4 or 8 bits is decoded exactly to FP32 and rounded once to BF16.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onegrid.convert.gguf_tokenizer import tokenizer_files
from onegrid.convert.shard_files import Slot, index_of, plan_files, write_file
from onegrid.errors import CheckpointError, NonFiniteError, WeightsError
from onegrid.model.shards import INDEX, some
from onegrid.model.spec import MOST_LAYERS, ModelSpec, tensor_shapes

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Value of general.architecture -> family of the decoder."""
LARGEST = 3.3895313892515355e38
"""Of BF16."""
EXPERT = re.compile(r"(.*\.mlp\.experts)\.([0-9]+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import wrote."""

    folder: Path
    spec: ModelSpec
    num_bytes: int
    stored: dict[str, int]
    """Format in the GGUF file -> number of tensors."""


def import_gguf(
    path: Path,
    folder: Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    done: Callable[[str], None] = lambda name: None,
) -> Imported:
    """Write the checkpoint of a GGUF file into a new folder, which appears whole or not at all.

    done  called with every canonical name that is written
    Raises WeightsError for a file that is not GGUF, a model that the decoder does not run, tensors that do not fit it,
    or a folder that is not empty; NonFiniteError for NaN or Inf; CheckpointError without the reader (extra `gguf`) or
    when the disk refuses.
    """
    if folder.exists() and any(folder.iterdir()):
        raise WeightsError(f"{folder} is not empty; import into a new folder")
    file = _Gguf(path)
    config = file.config()
    spec = ModelSpec.from_hf_config(config)
    shapes = tensor_shapes(spec)
    file.check(shapes)
    texts = tokenizer_files(file.fields, vocab_size=spec.vocab_size, max_positions=spec.max_positions)
    shards = plan_files(
        {name: {name: Slot("BF16", shape)} for name, shape in shapes.items()}, max_shard_bytes=max_shard_bytes
    )
    if len(shards) > 1:
        texts[INDEX] = json.dumps(index_of(shards), indent=2) + "\n"
    texts["config.json"] = json.dumps(config | _token_ids(texts), indent=2) + "\n"
    staging = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        staging.mkdir(parents=True)
        for shard in shards:
            write_file(shard, staging, lambda name: {name: file.tensor(name, shapes[name])}, done=done)
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Imported(folder, spec, sum(shard.size for shard in shards), file.stored())


class _Gguf:
    """One file: its fields as plain values, its tensors by canonical name."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(f'reading {path} needs gguf: pip install "onegrid[gguf]" ({error})') from error
        try:
            self._reader = gguf.GGUFReader(path)
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error}") from error
        except Exception as error:  # the reader raises whatever numpy does on bytes that are not GGUF
            raise WeightsError(f"{path} is no whole GGUF file: {type(error).__name__}: {error}") from error
        self.path = path
        self._dequantize = gguf.dequantize
        self.fields: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}
        self._stored = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.fields.get("general.architecture")
        if architecture not in FAMILIES:
            raise WeightsError(
                f"{path} holds the architecture {architecture!r}; the decoder runs {', '.join(sorted(FAMILIES))}"
            )
        self._architecture, self.family = architecture, FAMILIES[architecture]
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        num_layers = self._whole("block_count")
        if num_layers > MOST_LAYERS:
            raise WeightsError(f"{path} says it has {num_layers} layers; a model has at most {MOST_LAYERS}")
        self._names = gguf.get_tensor_name_map(kind, num_layers)

    def config(self) -> dict[str, Any]:
        """The content of config.json, without token ids."""
        heads, hidden = self._whole("attention.head_count"), self._whole("embedding_length")
        if "token_embd.weight" not in self._stored:
            raise WeightsError(f"{self.path} has no token_embd.weight; it is not a whole language model")
        if self.fields.get(f"{self._architecture}.rope.scaling.type", "none") != "none" or (
            "rope_freqs.weight" in self._stored
        ):
            raise WeightsError(f"{self.path} scales its rotary embedding, which the import does not translate")
        spec = {
            "model_type": self.family,
            "vocab_size": self._shape("token_embd.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_hidden_layers": self._whole("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole("attention.head_count_kv", heads),
            "head_dim": self._whole("attention.key_length", hidden // heads),
            "max_position_embeddings": self._whole("context_length"),
            "rms_norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._number("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": self.family == "llama" and "blk.0.attn_q.bias" in self._stored,
        }
        if self.family.endswith("_moe"):
            spec |= {
                "num_experts": self._whole("expert_count"),
                "num_experts_per_tok": self._whole("expert_used_count"),
                "moe_intermediate_size": self._whole("expert_feed_forward_length"),
                "norm_topk_prob": bool(self._field("expert_weights_norm", self.family == "qwen3_moe")),
            }
        if self.family == "qwen2_moe":
            spec["shared_expert_intermediate_size"] = self._whole("expert_shared_feed_forward_length")
        return ModelSpec.from_hf_config(spec).to_hf_config()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """WeightsError unless the file has exactly the tensors of these shapes."""
        faults, used = [], set()
        for name, shape in shapes.items():
            raw, expert = self._raw(name)
            used.add(raw)
            if raw not in self._stored:
                faults.append(f"{name} ({raw}) is missing")
                continue
            found = self._shape(raw)[0 if expert is None else 1 :]
            if shape not in (found, (1, *found)):
                faults.append(f"{raw} has shape {found}, {name} needs {shape}")
        faults += [f"{raw} has no place in the model" for raw in self._stored if raw not in used]
        if faults:
            raise WeightsError(f"{self.path} does not fit its own configuration: {some(faults)}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One canonical tensor in BF16. Raises NonFiniteError."""
        raw, expert = self._raw(name)
        stored = self._stored[raw]
        data = stored.data if expert is None else stored.data[expert]
        values = np.asarray(self._dequantize(data, stored.tensor_type), dtype=np.float32)
        if not (values.min() >= -LARGEST and values.max() <= LARGEST):  # NaN fails every comparison
            bad = int((~(np.abs(values) <= LARGEST)).sum())
            raise NonFiniteError(f"{raw} in {self.path} has {bad} NaN or Inf among {values.size} numbers in BF16")
        tensor = torch.from_numpy(np.array(values, copy=True)).reshape(shape).to(torch.bfloat16)
        if self.family == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = self._halves(name, tensor)
        return tensor

    def stored(self) -> dict[str, int]:
        """How many tensors the file has in which format."""
        counts: dict[str, int] = {}
        for tensor in self._stored.values():
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
        return counts

    def _halves(self, name: str, tensor: Tensor) -> Tensor:
        """GGUF keeps the rows of a Llama head in pairs that rotate together; Hugging Face keeps the two halves."""
        heads = self._whole("attention.head_count")
        if ".k_proj." in name:
            heads = self._whole("attention.head_count_kv", heads)
        pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()

    def _raw(self, name: str) -> tuple[str, int | None]:
        """Name in the file, and the expert in it."""
        match = EXPERT.fullmatch(name)
        plain = f"{match.group(1)}.{match.group(3)}" if match else name
        stem, _, suffix = plain.rpartition(".")
        raw = self._names.get_name(stem)
        if raw is None:
            raise WeightsError(f"{self._architecture} has no name for {stem} in GGUF")
        return f"{raw}.{suffix}", int(match.group(2)) if match else None

    def _shape(self, raw: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._stored[raw].shape))

    def _whole(self, name: str, default: int | None = None) -> int:
        value = self._field(name, default)
        if type(value) is not int or value < 1:
            raise WeightsError(
                f"{self.path} has {self._architecture}.{name} = {value!r}; it must be an integer above 0"
            )
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._field(name, default)
        if type(value) not in (int, float) or not 0 < value < LARGEST:
            raise WeightsError(
                f"{self.path} has {self._architecture}.{name} = {value!r}; it must be finite and above 0"
            )
        return float(value)

    def _field(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise WeightsError(f"{self.path} has no field {self._architecture}.{name}")
        return value


def _shortest(value: float) -> float:
    """GGUF stores FP32: the shortest decimal that is this FP32, such as 1e-05 for 9.99999975e-06."""
    return float(str(np.float32(value)))


def _token_ids(texts: Mapping[str, str]) -> dict[str, Any]:
    settings = json.loads(texts["generation_config.json"])
    return {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in settings}
