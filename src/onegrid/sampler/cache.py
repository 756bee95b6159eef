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
from onegrid.ops.pins import CHUNK, round_up


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

    longest  one more than the largest position
    """

    def __init__(self, cache: Cache, position_N: Tensor, longest: int) -> None:
        self.cache = cache
        self.position_N = position_N
        self.row_N = torch.arange(len(position_N), device=position_N.device)
        self.num_keys = round_up(longest, CHUNK)

    def __call__(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Writes k and v into the cache and attends over it."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.row_N, :, self.position_N] = k_NGD
        values[self.row_N, :, self.position_N] = v_NGD
        k_NSGD, v_NSGD = (x[: len(q_NHD), :, : self.num_keys].transpose(1, 2) for x in (keys, values))
        out_N1HD = attention(q_NHD.unsqueeze(1), k_NSGD, v_NSGD, self.position_N)
        return out_N1HD.squeeze(1)


class PrefillAttend:
    """Attention of whole prompts: their tokens are packed as rows for the linears, right-padded to a rectangle here.

    row_N, column_N  prompt and position of each row
    Keys and values of every layer stay in `keys`, `values` ([B, T, G, D] each) for the caller.
    """

    def __init__(self, row_N: Tensor, column_N: Tensor, *, num_prompts: int, longest: int) -> None:
        self.row_N, self.column_N = row_N, column_N
        self.shape = (num_prompts, longest)
        self.start_B = torch.zeros(num_prompts, dtype=torch.int64, device=row_N.device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Attends within each prompt."""
        assert layer == len(self.keys)
        q, k, v = (self._rectangle(x) for x in (q_NHD, k_NGD, v_NGD))
        self.keys.append(k)
        self.values.append(v)
        return attention(q, k, v, self.start_B)[self.row_N, self.column_N]

    def _rectangle(self, x_NHD: Tensor) -> Tensor:
        out = x_NHD.new_zeros(*self.shape, *x_NHD.shape[1:])
        out[self.row_N, self.column_N] = x_NHD
        return out
