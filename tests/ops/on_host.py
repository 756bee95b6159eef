"""CUDA C++ of the project, compiled for the CPU and run there thread by thread: its indices and bits, not its time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import onegrid.ops

HEADER = Path(__file__).with_name("primitives_on_host.h")


def run_on_host(
    folder: Path, file: str, function: str, grid: int, threads: int, args: list[torch.Tensor | int], **macros: int
) -> None:
    """Runs `function` of `file` over `grid` blocks of `threads`. What it does to contiguous tensors is done to them."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler, g++")
    text = (Path(onegrid.ops.__file__).parent / file).read_text(encoding="utf-8")
    text = text.replace("extern __shared__", "extern").replace("__shared__", "static")
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    shown, count = [], 0
    for a in args:
        shown.append(f"Pointer{{held[{count}].data()}}" if isinstance(a, torch.Tensor) else f"{a}")
        count += isinstance(a, torch.Tensor)
    sizes = ", ".join(f"{t.nbytes}" for t in tensors)
    source = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + HEADER.read_text(encoding="utf-8")
    source += f"\n{text}\nint main() {{\n  Held held({{{sizes}}});\n"
    source += f"  launch({grid}, {threads}, [&] {{ {function}({', '.join(shown)}); }});\n}}\n"
    (folder / "kernel.cpp").write_text(source, encoding="utf-8")
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-w"]
    made = subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel"], cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]
    memory = folder / "memory"
    memory.write_bytes(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors))
    done = subprocess.run(["./kernel"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    left = torch.frombuffer(bytearray(memory.read_bytes()), dtype=torch.uint8).split([t.nbytes for t in tensors])
    for tensor, now in zip(tensors, left, strict=True):
        tensor.view(torch.uint8).copy_(now.view(tensor.view(torch.uint8).shape))
