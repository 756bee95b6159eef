"""Capturing work as a CUDA graph while nothing else frees what graphs hold."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ONE = threading.Lock()
"""The collector is one for all threads: the first of two captures to end would wake it in the middle of the other."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph` of this thread alone, with Python's collector at rest.

    A graph that nobody owns any more is often part of a cycle. Were it collected inside the block, its destruction
    would call what no capture permits, and the capture would fail for a reason that has nothing to do with it.
    Where a capture broke off, torch leaves its stream as the current one and the memory pool open: the stream that was
    current comes back here, and the caller takes another pool.

    options  of `torch.cuda.graph`: pool, stream
    Captures of several threads take turns.
    """
    with _ONE:
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, capture_error_mode="thread_local", **options),
            ):
                yield
        finally:
            if was_enabled:
                gc.enable()
