"""How many of many flags are true: of NaN in weights, of codes that moved."""

from __future__ import annotations

from torch import Tensor, int64, uint8

_TOGETHER = 8 * 128
"""Flags whose words are added up before bytes are."""


def count_true(flags: Tensor) -> Tensor:
    """How many of `flags` (bool) are true, int64 of shape () on their device; waits for nothing.

    torch's own sum makes every flag a number of 64 bits first. Here eight flags are one such number: up to 255 of them
    add up without a carry from one byte into the next.
    """
    flags = flags.reshape(-1).contiguous()
    if flags.storage_offset() % 8:  # a view that begins within a word
        flags = flags.clone()
    whole = len(flags) // _TOGETHER * _TOGETHER
    words = flags[:whole].view(int64).view(-1, _TOGETHER // 8)
    return words.sum(-1).view(uint8).sum() + flags[whole:].sum()
