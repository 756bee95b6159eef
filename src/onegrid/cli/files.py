"""Files that a command was asked to write."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from onegrid.errors import ConfigError


def write_file(option: str, file: Path, text: str | None) -> None:
    """The text whole or not at all; None only looks whether it could be. ConfigError where it cannot."""
    temporary = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text or "", encoding="utf-8")
        temporary.unlink() if text is None else os.replace(temporary, file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{option} {file} cannot be written: {error}; name another place") from error
