"""Rules that hold for every file of the project."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "onegrid"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = ("src", "tests", "configs", "benchmarks", "docs", "scripts", ".ci")
SUFFIXES = {".py", ".toml", ".md", ".sh", ".cu", ".h", ""}
TEXTS = sorted(
    path
    for path in [*ROOT.glob("*.*"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    if path.is_file() and path.suffix in SUFFIXES and not {"__pycache__"} & set(path.parts)
)
MEASURED = sorted((ROOT / "benchmarks").glob("*.json"))

ORDER = [
    "errors",
    "types",
    "formats",
    "recipe",
    "ops",
    "model",
    "learner",
    "sampler",
    "sync",
    "guard",
    "tracker",
    "rl",
    "config",
    "study",
    "report",
    "cli",
    "__main__",
]
EVERYWHERE = {"errors", "types"}
MAY_IMPORT = {part: set(ORDER[:i]) for i, part in enumerate(ORDER)}
MAY_IMPORT["sampler"] -= {"learner"}
MAY_IMPORT["sampler"] |= {"convert"}  # engines take weights in the layouts of checkpoints
for _part in ("guard", "rl", "config", "study", "report", "cli"):
    MAY_IMPORT[_part] |= {"mismatch"}
MAY_IMPORT["study"] |= {"cost", "convert", "cluster"}
MAY_IMPORT["cli"] |= {"cost", "convert", "cluster"}
MAY_IMPORT["mismatch"] = EVERYWHERE
MAY_IMPORT["convert"] = MAY_IMPORT["cost"] = EVERYWHERE | {"formats", "recipe", "model"}
MAY_IMPORT["cluster"] = EVERYWHERE | {"formats", "recipe", "ops", "model", "learner", "sampler", "sync"}


def part_of(path: Path) -> str:
    """The top-level noun a file belongs to, such as "formats" or "errors"."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[tuple[str, int]]:
    """(part, line) of every import of another part, wherever in the file it stands."""
    module = ("onegrid", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module[: -node.level]) + "." if node.level else ""
            source = (base + (node.module or "")).rstrip(".")
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "onegrid" and len(pieces) > 1 and pieces[1] != "__version__":
                found.add((pieces[1], node.lineno))
    return found


def relative(path: Path) -> str:
    """Name of a file in test ids and messages."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_one_way(path):
    part = part_of(path)
    if part == "__init__":
        assert not imported_parts(path)
        return
    assert part in MAY_IMPORT, f"{part} has no place in the import order; give it one here and in ARCHITECTURE.md"
    wrong = sorted((line, p) for p, line in imported_parts(path) if p != part and p not in MAY_IMPORT[part])
    assert not wrong, f"{relative(path)} imports upwards (line, part): {wrong}; {part} may import {MAY_IMPORT[part]}"


@pytest.mark.parametrize("path", [p for p in TEXTS if p.suffix == ".py"], ids=relative)
def test_a_file_has_one_idea(path):
    assert len(path.read_text().splitlines()) <= 400, "past 400 lines there is a second idea"
    assert path.stem not in {"utils", "util", "common", "core", "helpers", "helper", "misc"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_whatever_is_public_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{relative(path)} does not say what it is"
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent, f"{relative(path)}: no docstring on {silent}"


@pytest.mark.parametrize("path", [*TEXTS, *MEASURED], ids=relative)
def test_no_file_knows_the_machine_it_was_written_on(path):
    found = re.findall(r"(?<![\w.}])/(?:work|tmp|root|home)/\S*", path.read_text())
    assert path == Path(__file__) or not found, f"{relative(path)}: {found}"


def test_importing_the_package_loads_no_torch():
    code = "import sys, onegrid, onegrid.cli, onegrid.errors; print(sorted(m for m in sys.modules if m in HEAVY))"
    heavy = {"torch", "numpy", "pyarrow", "transformers", "safetensors", "reasoning_gym"}
    loaded = subprocess.run(
        [sys.executable, "-c", code.replace("HEAVY", repr(heavy))],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert loaded.stdout.strip() == "[]"


def test_every_test_extra_is_installed_by_the_one_command_of_the_readme():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert "onegrid train configs/quickstart.toml" in blocks[0]
    assert "[test]" in blocks[1] and "pytest" in blocks[1]
    assert {"test", "tasks", "hf"} <= project["optional-dependencies"].keys()
    assert all(len(block.strip().splitlines()) == 1 for block in blocks[:2]), "each is one command"
