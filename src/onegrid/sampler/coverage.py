"""Which bytes of a part have arrived: runs that merge, so that pieces may be of any size and come in any order."""

from __future__ import annotations

from bisect import bisect_right


class Coverage:
    """Disjoint, sorted, non-touching runs within 0 .. num_bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.arrived_bytes = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> bool:
        """Notes that start .. end (exclusive) arrived. False, and nothing noted, where a byte of it already had."""
        if start == end:
            return True
        at = bisect_right(self._starts, start)
        if (at and self._ends[at - 1] > start) or (at < len(self._starts) and self._starts[at] < end):
            return False
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
        self.arrived_bytes += end - start
        return True

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not arrived."""
        return self.num_bytes - self.arrived_bytes

    @property
    def complete(self) -> bool:
        """True when every byte arrived."""
        return self.missing_bytes == 0
