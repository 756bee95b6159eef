"""Where the time of a step goes: the `perf/` metrics, the only ones that two equal runs do not share."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds of the stages of one step."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.stage = "start"
        """The stage that runs, or that an error has ended."""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the block to those of the stage; on a GPU its queued work counts where it was queued."""
        began, before = time.perf_counter(), self.stage
        self.stage = stage
        try:
            yield
            self.stage = before
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - began

    def add(self, other: Clock) -> None:
        """The stages of another clock, which ran beside this one."""
        for stage, seconds in other._seconds.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        """Seconds a stage and of the whole step, tokens a second of the sampler, and memory high-water marks.

        num_tokens  generated in the stage "rollout"
        """
        found = {f"perf/{stage}_seconds": seconds for stage, seconds in self._seconds.items()}
        found["perf/step_seconds"] = time.perf_counter() - self._began
        if self._seconds.get("rollout"):
            found["perf/rollout_tokens_per_second"] = num_tokens / self._seconds["rollout"]
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts kilobytes, except there
        found["perf/host_memory_bytes"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["perf/gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        return found
