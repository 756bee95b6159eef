"""All trackers of a run: the lines of metrics.jsonl, told to each in the order of steps.

The file stays the record. A tracker is a view of it: what one has not seen, because it was added or lost, is told to
it again when the run goes on; what it has seen is not, so that no axis goes back. A tracker that fails while training
goes on is reported once, and its lost lines are counted in trackers.json.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onegrid.errors import ConfigError
from onegrid.tracker.config import TrackersConfig

LIBRARIES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
}
"""What must be importable, by tracker; the extra of pyproject.toml has the tracker's name."""

STATE = "trackers.json"


class Tracker(Protocol):
    """One open run in one library."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step, under the keys of metrics.jsonl."""

    def close(self) -> None:
        """Everything is on its way when this returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a library is told about the run."""

    folder: Path
    """The run directory."""
    run_id: str
    """The same before and after a resume."""
    name: str
    settings: Mapping[str, Any]
    """The resolved configuration, as nested tables."""
    resumed: bool
    """Whether this tracker has seen the run before."""


def check_installed(config: TrackersConfig) -> None:
    """Raises ConfigError for a tracker whose library is not here, with the extra to install."""
    for name in config.use:
        missing = [library for library in LIBRARIES[name] if importlib.util.find_spec(library) is None]
        if missing:
            raise ConfigError(
                f"trackers.use names {name!r}, which needs {', '.join(missing)}: pip install 'onegrid[{name}]', "
                "or take it out of trackers.use"
            )


class Trackers:
    """Open trackers of one run directory; a context manager that closes them.

    settings  the resolved configuration, as nested tables
    past      lines of metrics.jsonl so far, each with "step"
    say       shows a person one line
    Raises ConfigError where a library is missing or refuses to open, such as for want of a network or a key.
    """

    def __init__(
        self,
        config: TrackersConfig,
        folder: Path,
        *,
        settings: Mapping[str, Any],
        past: Iterable[Mapping[str, Any]] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        check_installed(config)
        self._folder, self._say = folder, say
        self._state = read_state(folder) if config.use else {}
        self._open: dict[str, Tracker] = {}
        for name in config.use:
            resumed = name in self._state
            state = self._state.setdefault(name, {"run": secrets.token_hex(4), "last_step": -1, "lost": 0})
            opening = Opening(
                folder=folder,
                run_id=state["run"],
                name=folder.resolve().name,
                settings=settings,
                resumed=resumed,
            )
            try:
                module = importlib.import_module(f"onegrid.tracker.{name}_run")
                self._open[name] = module.open_run(getattr(config, name, None), opening)
                state["run"] = getattr(self._open[name], "run_id", state["run"])
            except Exception as error:  # each library has its own errors, down to bare Exception
                self.close()
                raise ConfigError(
                    f"{name} does not open: {type(error).__name__}: {error}; mend it, or take it out of trackers.use"
                ) from error
        if self._open:
            self._write_state()
        for line in past:
            self.log(int(line["step"]), line)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Tells every tracker a step that it has not seen. Text and truth values stay in the file alone."""
        numbers = {k: float(v) for k, v in values.items() if k != "step" and type(v) in (int, float)}
        for name, tracker in self._open.items():
            state = self._state[name]
            if step <= state["last_step"]:
                continue
            try:
                tracker.log(step, numbers)
                state["last_step"] = step
            except Exception as error:
                self._lost(name, error)
        if self._open:
            self._write_state()

    def close(self) -> None:
        """Closes all, also when one of them fails."""
        for name, tracker in self._open.items():
            try:
                tracker.close()
            except Exception as error:
                self._lost(name, error)
        self._open = {}

    def _lost(self, name: str, error: Exception) -> None:
        state = self._state[name]
        if not state["lost"]:
            self._say(
                f"warning: {name} failed ({type(error).__name__}: {error}); metrics.jsonl has everything, training "
                f"goes on, and {STATE} counts what {name} lost"
            )
        state["lost"] += 1

    def _write_state(self) -> None:
        """A disk that is full is reported by the record, which writes right before."""
        temporary = self._folder / f".{STATE}.partial"
        try:
            temporary.write_text(json.dumps(self._state, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(temporary, self._folder / STATE)
        except OSError as error:
            self._say(f"warning: cannot write {self._folder / STATE}: {error}")


def read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """By tracker: "run" (its id there), "last_step" and "lost" (writes that failed). Empty if there is none."""
    try:
        return dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder / STATE} is not what a run wrote: {error}; delete it to begin new runs") from error


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{path}.{key}" if path else key
        found |= flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found
