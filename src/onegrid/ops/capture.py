"""Capturing work as a CUDA graph while nothing else frees what graphs hold, and kernels that overlap inside of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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


_here = threading.local()


@contextmanager
def early_launches() -> Iterator[None]:
    """Kernels of this thread that know how begin before the one before them has ended, so that starting costs nothing.

    Programmatic dependent launch (CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization").
    Such a kernel waits for the one before it ahead of everything that another kernel writes or may still read, and then
    lets the next one start. Our matmuls of few rows read weights before they wait, so no two kernels inside may have a
    write of weights between them. They do not let the next one start: in the little room that they leave, blocks would
    crowd on few multiprocessors and do all of their work there. For steps that are captured, and for the runs before a
    capture in which compilers prepare themselves.
    """
    before, _here.early = getattr(_here, "early", False), True
    try:
        yield
    finally:
        _here.early = before


def may_begin_early(device: torch.device) -> bool:
    """Inside `early_launches`, on a GPU that can: compute capability 9.0 and up."""
    return getattr(_here, "early", False) and device.type == "cuda" and _can(device)


@cache
def _can(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
