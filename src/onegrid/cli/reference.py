"""`onegrid config`: every key of a configuration, with what the class that has it says about it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

from rich.console import Console
from rich.table import Table

from onegrid.config import FieldInfo, RunConfig, reference
from onegrid.errors import ConfigError

HEAD = """# Configuration

Written by `onegrid config --markdown` from the classes that read it; a test keeps it so. A file holds what differs from
the defaults; `onegrid train CONFIG KEY=VALUE` replaces one key by its dotted name, such as `learner.lr=1e-4`, and
`onegrid train CONFIG --dry-run` prints all of them as they are resolved. Unknown keys are errors that name the nearest
one. A key without a default must be given where its section is.
"""


def run(section: str | None, *, markdown: bool) -> None:
    """Print the reference. Raises ConfigError for a section that is none."""
    rows = [row for row in reference() if not section or row.key == section or row.key.startswith(f"{section}.")]
    rows.sort(key=lambda row: "." in row.key)  # what belongs to no section comes first, as a TOML file wants it
    if not rows:
        names = dict.fromkeys(row.key.partition(".")[0] for row in reference())
        raise ConfigError(f"there is no section or key {section!r}; there are {', '.join(names)}")
    if markdown:
        print(page(rows), end="")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("key", "default", "type", "meaning"):
        table.add_column(title, overflow="fold", no_wrap=title == "key")
    for row in rows:
        table.add_row(row.key, row.default or "must be given", row.type, meaning(row))
    Console(highlight=False, markup=False).print(table)


def page(rows: list[FieldInfo]) -> str:
    """Markdown with a table for every section, in the order of the classes."""
    parts, section = [HEAD], None
    for row in rows:
        here, _, leaf = row.key.rpartition(".")
        if here != section:
            section = here
            about = "" if row.owner is RunConfig else inspect.cleandoc(row.owner.__doc__ or "").replace("\n", " ")
            title = f"`[{here}]`" if here else "Top level"
            parts.append(f"\n## {title}\n" + (f"\n{_cell(about)}\n" if about else ""))
            parts.append("\n| key | default | type | meaning |\n|---|---|---|---|\n")
        default = f"`{_cell(row.default)}`" if row.default else "must be given"
        parts.append(f"| `{leaf}` | {default} | {_cell(row.type)} | {_cell(meaning(row))} |\n")
    return "".join(parts)


def meaning(row: FieldInfo) -> str:
    """What stands below the key in its class; empty where nothing does."""
    return meanings(row.owner).get(row.key.rpartition(".")[2], "")


@cache
def meanings(cls: type) -> dict[str, str]:
    """Field name -> the text right below it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
