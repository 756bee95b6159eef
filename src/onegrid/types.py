"""The nouns that flow: requests and rollouts from the sampler, sequences and batches to the learner.

Kept free of torch.nn, models and formats, so that every part can import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits. 0 takes the most likely token (ties to the lower id) and reports its probability at 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    record_routing: bool = False
    """Keep the experts chosen for every token (mixture-of-experts models)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to be sampled: its tokens depend on (seed, prompt_index, sample, position) and weights alone."""

    prompt_index: int
    """Position of the prompt in the task's order; also the group of the completion."""
    sample: int
    """0 .. samples per prompt - 1."""
    prompt_tokens: tuple[int, ...]
    seed: int
    """Seed of the run and step."""
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion of R tokens. The stop token, if one was drawn, is kept once, with its log-probability."""

    request: Request
    tokens_R: Tensor
    """int64"""
    logp_R: Tensor
    """FP32, nats, at the sampling temperature, over the kept set where top-p or top-k truncated."""
    version_R: Tensor
    """int64, weight version that produced each token."""
    finish: str
    """"stop" or "length"."""
    text: str = ""
    kept: tuple[Tensor, ...] | None = None
    """Per token the sorted ids (int64) of the kept set, only when top-p or top-k truncated."""
    routing_RLE: Tensor | None = None
    """int16 expert ids (R tokens, L MoE layers, E slots), only where asked for."""
    reward: float | None = None
    """None until scored, or when unscorable (then masked and counted, never 0)."""
    scored: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Where there are several rewards: each by name, before its weight, without those that failed or do not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What rewards are given besides a completion. Plain data, of JSON's types."""

    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All rollouts of one prompt."""

    group_id: int
    rollouts: tuple[Rollout, ...]
    problem: Problem | None = None
    """Once they are scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One training sequence: prompt of P tokens, response of R tokens. Response tensors have length R."""

    tokens_T: Tensor
    """int64, P + R."""
    num_prompt: int
    """P, at least 1."""
    sampler_logp_R: Tensor
    """FP32 nats."""
    version_R: Tensor
    advantage_R: Tensor
    """FP32."""
    mask_R: Tensor
    """bool: True where the token takes part in the loss. Masked positions may hold anything."""
    group_id: int
    kept: tuple[Tensor, ...] | None = None
    routing_RLE: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What the learner eats in one update."""

    sequences: tuple[Sequence, ...]
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Response tokens that take part in the loss."""
        return sum(int(s.mask_R.sum()) for s in self.sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One array of a canonical tensor as it crosses the wire."""

    dtype: str
    """torch name without prefix, such as "uint8", "float32", "bfloat16"."""
    shape: tuple[int, ...]
    num_bytes: int
    digest: int
    """64-bit additive digest of formats/digest.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One canonical tensor in a manifest."""

    shape: tuple[int, ...]
    """Logical shape."""
    format: str
    """Quantizer name, or "bf16"."""
    parts: dict[str, Part]
    """"codes", "scales", "amax" of a quantized tensor, "values" of a BF16 one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Table of contents of one version."""

    version: int
    plan_digest: str
    entries: dict[str, Entry]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of bytes of one part of one canonical tensor."""

    name: str
    part: str
    offset: int
    data: Tensor
    """uint8, one axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Pieces that travel together. Any size, any order."""

    version: int
    pieces: tuple[Piece, ...]
