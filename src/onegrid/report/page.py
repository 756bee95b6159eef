"""`onegrid report`: one HTML page about one or several runs, with everything in it and nothing from a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from onegrid.errors import CheckpointError, ConfigError
from onegrid.report.charts import charts
from onegrid.report.facts import NOT_MEASURED, differences, facts, identity, mismatch, number
from onegrid.report.lights import rows
from onegrid.report.network import picture, short
from onegrid.report.reading import Run, read_runs
from onegrid.report.samples import samples


def write_report(folders: Sequence[Path], output: Path) -> list[str]:
    """Write the page of these runs in one step, and return what it says is missing.

    Raises CheckpointError for a folder that is no run or a page that cannot be written, ConfigError without plotly.
    """
    runs = read_runs(folders)
    text = render(runs)
    temporary = output.with_name(f".{output.name}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, output)
    except OSError as error:
        raise CheckpointError(f"cannot write {output}: {error}") from error
    return [sentence if len(runs) == 1 else f"{run.name}: {sentence}" for run in runs for sentence in run.missing]


def render(runs: Sequence[Run]) -> str:
    """The page as text. Scripts run only if their hash stands in its policy, so that no text of a run ever runs."""
    environment = _templates()
    here = resources.files("onegrid.report")
    environment.filters["short"] = short
    environment.filters["number"] = number
    drawn = charts(runs)
    library, script = _plotly(), (here / "page.js").read_text(encoding="utf-8")
    views = [_view(run) for run in runs]
    return environment.from_string((here / "page.html").read_text(encoding="utf-8")).render(
        title=", ".join(run.name for run in runs),
        views=views,
        several=len(runs) > 1,
        labels=list(dict.fromkeys(label for view in views for label in view["by_label"])),
        charts=[{**chart, "empty": not (chart.get("series") or chart.get("z"))} for chart in drawn],
        differences=differences(runs) if len(runs) > 1 else [],
        metrics=_table(runs),
        style=(here / "page.css").read_text(encoding="utf-8"),
        data=_script_text(json.dumps({"charts": drawn, "runs": [run.name for run in runs]}, allow_nan=False)),
        library=library,
        script=script,
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in (library, script)),
        not_measured=NOT_MEASURED,
    )


def _view(run: Run) -> dict[str, Any]:
    found = samples(run, run.missing)
    for name, state in run.trackers.items():
        if isinstance(state, dict) and state.get("lost"):
            run.missing.append(f"{name} lost {state['lost']} writes; metrics.jsonl, and so this page, has everything.")
    return {
        "run": run,
        "facts": (found_facts := facts(run)),
        "by_label": {fact.label: fact for fact in found_facts},
        "identity": identity(run),
        "mismatch": mismatch(run),
        "lights": rows(run),
        "incidents_known": (run.folder / "incidents.jsonl").exists(),
        "picture": picture(run.plan),
        "samples": found,
        "versions": sorted((str(k), _shown(v)) for k, v in run.versions.items()),
    }


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _table(runs: Sequence[Run]) -> list[tuple[str, list[list[str]]]]:
    """Every metric of every run: first, last, smallest and largest value, as the record has them."""
    keys = sorted({key for run in runs for key in run.keys("")} - {"step"})
    found = []
    for key in keys:
        cells = []
        for run in runs:
            _, values = run.series(key)
            cells.append([repr(v) for v in (values[0], values[-1], min(values), max(values))] if values else [])
        found.append((key, cells))
    return found


def _templates() -> Any:
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise ConfigError(f"the report needs the library jinja2: pip install 'onegrid[report]' ({error})") from error
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(f"the report needs the library plotly: pip install 'onegrid[report]' ({error})") from error
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _script_text(text: str) -> str:
    """JSON that cannot end the element it stands in."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
