"""`onegrid version`."""

from __future__ import annotations


def run() -> None:
    """One line a library or device, as versions.json of a run directory has them."""
    from onegrid.rl.record import versions

    found = versions()
    for name, value in found.items():
        print(f"{name:<{max(map(len, found))}} {value}")
