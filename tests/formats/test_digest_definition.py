"""The digest by its own page, in Python's integers: another machine, or another version, must give the same number."""

from __future__ import annotations

import pytest
import torch

from onegrid.formats import digest, digest_rows
from onegrid.formats.digest import CHUNK, ROLES, digests

MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def weight(position: int, role: str) -> int:
    """Odd weight of the word that holds a byte."""
    word = mixed(position % CHUNK // 4) | 1
    return word * (mixed(mixed(position // CHUNK) ^ ROLES.index(role)) | 1)


def defined(data: bytes, start: int, role: str) -> int:
    """Every word times its weight, the second of two as a signed number, and once more the weight for each byte."""
    total = 0
    for position, byte in enumerate(data, start):
        value = byte << 8 * (position % 4)
        if position % 8 == 7 and byte > 127:
            value -= 1 << 32
        total += weight(position, role) * (value + 1)
    return total & MASK


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("start", [0, 5, CHUNK - 4, 3 * CHUNK + 7, (1 << 31) - 11, (1 << 33) - 17])
def test_a_digest_is_the_sum_that_its_page_defines(role, start, device):
    data = torch.randint(0, 256, (61,), generator=torch.Generator().manual_seed(start % 97), dtype=torch.uint8)
    assert digest(data.to(device), start=start, role=role) == defined(bytes(data.tolist()), start, role)


def test_every_word_and_chunk_has_an_odd_weight_so_that_no_changed_byte_is_lost():
    rows = torch.zeros(CHUNK // 4, 4, dtype=torch.uint8)
    rows[:, 0] = 1  # a word of 1 adds its weight, and 4 bytes that are there add it four times more
    assert all(value % 2 for value in digest_rows(rows))
    assert all(digest(rows[0], start=chunk * CHUNK) % 2 for chunk in range(300))


@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0)])
def test_a_tensor_without_elements_has_the_digest_of_nothing(shape, device):
    empty = torch.empty(shape, device=device)
    assert (digest(empty), digest_rows(empty), digests([(empty, "codes")])) == (0, [], [0])
