"""Stopping a run from outside: the first signal asks, and the run ends at its next safe point; the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether a run has been asked to end."""

    signal: str = ""
    """Name of the signal that asked; empty while none has."""


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Inside, SIGTERM and SIGINT only set `Stop.signal`; a second one raises KeyboardInterrupt.

    In another thread than the main one, which gets no signals, nothing is changed.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.signal:
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
