"""The faults that must be caught, by name.

A row is a claim that tests and campaign put to the proof: `fires` lists every check that objects when all are asked,
and no other may. `transaction` refuses on its own, before the others are asked; `wake` is the proof after a sleep.
"""

from __future__ import annotations

from difflib import get_close_matches

from onegrid.errors import ConfigError
from onegrid.guard.fault import Fault
from onegrid.guard.faults_run import ROWS as RUN
from onegrid.guard.faults_sampler import ROWS as SAMPLER

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*SAMPLER, *RUN)}
"""Every fault by name."""


def fault(name: str) -> Fault:
    """The fault of that name. ConfigError with the nearest names otherwise."""
    if name not in FAULTS:
        near = ", ".join(map(repr, get_close_matches(name, FAULTS, n=3, cutoff=0.4)))
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(f"no fault is called {name!r}; {hint}`onegrid faults --list` names all {len(FAULTS)}")
    return FAULTS[name]
