"""CUDA C++ of the project, compiled for the CPU and run there thread by thread: its indices and bits, not its time."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import onegrid.ops
from onegrid.ops.cuda_source import TensorMap
from tests.patience import PATIENCE_S

HEADER = Path(__file__).with_name("primitives_on_host.h")
COMPILE = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-w"]


@cache
def _precompiled() -> tempfile.TemporaryDirectory[str]:
    """A folder with the header, compiled once: it takes twice as long as a kernel."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    header = Path(shutil.copy(HEADER, folder.name))
    made = subprocess.run([*COMPILE, "-x", "c++-header", header.name], cwd=folder.name, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]
    return folder


def run_on_host(
    folder: Path,
    file: str,
    function: str,
    grid: int,
    threads: int,
    args: list[torch.Tensor | TensorMap | int],
    **macros: int,
) -> None:
    """Runs `function` of `file` over `grid` blocks of `threads`. What it does to contiguous tensors is done to them."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler, g++")
    text = (Path(onegrid.ops.__file__).parent / file).read_text(encoding="utf-8")
    text = text.replace("extern __shared__", "extern").replace("__shared__", "static")
    tensors, shown = [], []
    for a in args:
        pointer = f"held[{len(tensors)}].data()"
        if isinstance(a, TensorMap):
            num_rows, depth = a.x.shape
            size = a.x.element_size()
            shown.append(f"Map{{{pointer}, {num_rows}, {depth * size}, {a.rows}, {a.width}, {size}}}")
            tensors.append(a.x)
        elif isinstance(a, torch.Tensor):
            shown.append(f"Pointer{{{pointer}}}")
            tensors.append(a)
        else:
            shown.append(f"{a}")
    sizes = ", ".join(f"{t.nbytes}" for t in tensors)
    source = f'#include "{HEADER.name}"\n' + "".join(f"#define {name} {value}\n" for name, value in macros.items())
    source += f"\n{text}\nint main() {{\n  Held held({{{sizes}}});\n"
    source += f"  launch({grid}, {threads}, [&] {{ {function}({', '.join(shown)}); }});\n}}\n"
    program = folder / f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if not program.exists():
        program.with_suffix(".cpp").write_text(source, encoding="utf-8")
        command = [*COMPILE, f"-I{_precompiled().name}", f"{program.name}.cpp", "-o", program.name]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[:4000]
    memory = folder / "memory"
    memory.write_bytes(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors))
    done = subprocess.run([f"./{program.name}"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    left = torch.frombuffer(bytearray(memory.read_bytes()), dtype=torch.uint8).split([t.nbytes for t in tensors])
    for tensor, now in zip(tensors, left, strict=True):
        tensor.view(torch.uint8).copy_(now.view(tensor.view(torch.uint8).shape))
