"""Keys and values of running completions in preallocated slots, and of prompts that more samples may share.

Running completions are a contiguous prefix of the slots, so a decode step slices and never gathers. When one ends, the
last running one moves into its slot.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.model.spec import ModelSpec
from onegrid.ops.attention import attention
from onegrid.ops.grouped import take
from onegrid.ops.packed_attention import Segments
from onegrid.ops.pins import CHUNK, round_up
from onegrid.ops.table import PLAIN, Kernels


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What the prefill of B prompts leaves, enough to start any number of samples."""

    keys: list[Tensor]
    """Per layer [B, T, G, D] BF16, right-padded to the longest prompt."""
    values: list[Tensor]
    hidden_BD: Tensor
    """BF16, of the last prompt token, after the final norm."""
    routing_BLE: Tensor | None
    """int16 experts of the last prompt token, only where recorded."""

    def one(self, row: int, length: int) -> Prefilled:
        """One prompt of `length` tokens, in storage of its own."""
        rows = slice(row, row + 1)
        return Prefilled(
            [keys[rows, :length].clone() for keys in self.keys],
            [values[rows, :length].clone() for values in self.values],
            self.hidden_BD[rows].clone(),
            None if self.routing_BLE is None else self.routing_BLE[rows].clone(),
        )


class PrefixStore:
    """Prompts already computed, least recently used first out. Keyed by version: an old version's are never found."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._prefixes: OrderedDict[tuple[int, tuple[int, ...]], Prefilled] = OrderedDict()
        self._num_tokens = 0

    def get(self, version: int, prompt: tuple[int, ...]) -> Prefilled | None:
        """The prefix of `prompt` at `version`, or None."""
        prefix = self._prefixes.get((version, prompt))
        if prefix is not None:
            self._prefixes.move_to_end((version, prompt))
        return prefix

    def put(self, version: int, prompt: tuple[int, ...], prefix: Prefilled) -> None:
        """Keeps a prefix as long as there is room; one longer than the whole store is not kept."""
        if len(prompt) > self.max_tokens:
            return
        if self._prefixes.pop((version, prompt), None) is None:
            self._num_tokens += len(prompt)
        self._prefixes[version, prompt] = prefix
        while self._num_tokens > self.max_tokens:
            (_, old), _ = self._prefixes.popitem(last=False)
            self._num_tokens -= len(old)

    def versions(self) -> set[int]:
        """Of the weights that made what is kept."""
        return {version for version, _ in self._prefixes}

    def clear(self) -> None:
        """Drops everything."""
        self._prefixes.clear()
        self._num_tokens = 0


class Cache:
    """Key and value slots, BF16 [slots, G, positions, D] per layer; positions are whole chunks of the attention.

    Positions of one head lie together, so that a chunk is read without moving it.
    """

    def __init__(self, spec: ModelSpec, *, max_slots: int, max_len: int, device: torch.device) -> None:
        shape = (max_slots, spec.num_kv_heads, round_up(max_len, CHUNK), spec.head_dim)
        self.keys = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(spec.num_layers)]
        self.values = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(spec.num_layers)]

    @classmethod
    def twin(cls, cache: Cache, num_slots: int) -> Cache:
        """`num_slots` slots like those of `cache`, all layers in one storage: for trial runs."""
        made = cls.__new__(cls)
        shape = (num_slots, *cache.keys[0].shape[1:])
        made.keys, made.values = (
            [torch.zeros(shape, dtype=x[0].dtype, device=x[0].device)] * len(x) for x in (cache.keys, cache.values)
        )
        return made

    def load(self, slot_M: Tensor, prompt_M: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        """Writes prompts into slots: row prompt_M[m] of each layer's [B, T, G, D] into slot slot_M[m]."""
        for slots, new in zip([*self.keys, *self.values], [*keys, *values], strict=True):
            slots[slot_M, :, : new.shape[1]] = new[prompt_M].transpose(1, 2)

    def move(self, source_N: Tensor, target_N: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots `source_N` into slots `target_N`."""
        for side in (self.keys, self.values):
            for slots in side:
                slots[target_N, :, :length] = slots[source_N, :, :length]

    def clear(self) -> None:
        """Zeros everywhere: a NaN left behind would reach every later completion of its slot."""
        for slots in (*self.keys, *self.values):
            slots.zero_()


class DecodeAttend:
    """Attention of one new token per slot: row n of the decoder is slot n, at position position_N[n].

    longest  one more than the largest position, or None where nobody may wait to know it: the whole slot is then the
             limit (kernels that stop at each row's own position do not mind)
    """

    def __init__(self, cache: Cache, position_N: Tensor, longest: int | None, kernels: Kernels = PLAIN) -> None:
        self.cache, self.kernels = cache, kernels
        self.position_N = position_N
        num_positions = cache.keys[0].shape[2]
        self.num_keys = num_positions if longest is None else min(num_positions, round_up(longest, CHUNK))

    def __call__(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Writes k and v into the cache and attends over it."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.kernels.slots is not None:
            return self.kernels.slots(q_NHD, k_NGD, v_NGD, keys, values, self.position_N)
        row_N = torch.arange(len(self.position_N), device=self.position_N.device)
        keys[row_N, :, self.position_N] = k_NGD
        values[row_N, :, self.position_N] = v_NGD
        k_NSGD, v_NSGD = (x[: len(q_NHD), :, : self.num_keys].transpose(1, 2) for x in (keys, values))
        out_N1HD = attention(q_NHD.unsqueeze(1), k_NSGD, v_NSGD, self.position_N)
        return out_N1HD.squeeze(1)


class PrefillAttend:
    """Attention of whole prompts, whose tokens are packed as rows.

    Keys and values of every layer stay in `keys`, `values` ([B, T, G, D] each, right-padded) for the caller.
    """

    def __init__(self, segments: Segments, kernels: Kernels = PLAIN) -> None:
        self.segments, self.kernels = segments, kernels
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Attends within each prompt."""
        assert layer == len(self.keys)
        self.keys.append(self._rectangle(k_NGD))
        self.values.append(self._rectangle(v_NGD))
        return self.kernels.packed_attention(q_NHD, k_NGD, v_NGD, self.segments)

    def _rectangle(self, x_NGD: Tensor) -> Tensor:
        segments = self.segments
        return take(x_NGD, segments.rectangle.source).unflatten(0, (len(segments.first_B), segments.longest))
