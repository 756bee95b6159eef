"""The command line: one file per command, imported only when that command runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of `onegrid`."""
    raise SystemExit("onegrid: no command is built yet")
