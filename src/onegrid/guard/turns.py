"""Whose turn it is: what is too dear for every tensor at every synchronization is done for some, and all get there."""

from __future__ import annotations

import math
from collections.abc import Sequence


def due(keys: Sequence[str], *, version: int, per_sync: int) -> list[str]:
    """The keys whose turn it is at `version`, `per_sync` of them."""
    if not keys:
        return []
    count = min(per_sync, len(keys))
    return [keys[(version * count + i) % len(keys)] for i in range(count)]


def turns(num_keys: int, per_sync: int) -> int:
    """Within how many synchronizations every key has its turn."""
    return math.ceil(num_keys / max(1, per_sync))
