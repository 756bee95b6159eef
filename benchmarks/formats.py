"""How fast quantizers run, eagerly and compiled, against a copy of the same tensor. Prints; asserts nothing about time.

python benchmarks/formats.py [--rows 4096] [--columns 1024] [--dtype float32] [--device cpu] [--threads 2] [NAME ...]

Speeds are elements of the input per second, from the median call. "bytes" says whether the compiled result equals the
eager one. Compilation takes some seconds for each format.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from onegrid.formats import QUANTIZERS, Quantizer, can_compile, digest, quantize, quantize_decode

DEFAULT = ("mxfp8", "nvfp4", "nvfp4_row", "mxfp4", "fp8_row", "fp8_1x128", "fp8_128x128_fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=DEFAULT, metavar="NAME", choices=[*QUANTIZERS, DEFAULT])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(options.rows, options.columns, device=options.device).to(getattr(torch, options.dtype))
    copy = torch.empty_like(x)
    copy_seconds = seconds(lambda: copy.copy_(x), x.device)
    print(f"torch {torch.__version__}, {x.device}, {options.threads} threads, {tuple(x.shape)} {options.dtype}")
    print(f"copy: {x.numel() / copy_seconds / 1e6:.0f} M elements/s\n")
    print(f"{'format':20} {'what':16} {'eager M/s':>10} {'compiled M/s':>13} {'of a copy':>10} {'speed-up':>9}  bytes")
    for name in options.names:
        for what, function in (("quantize", _codes), ("quantize_decode", _values)):
            _line(name, what, function, x, copy_seconds, options.eager)


def _codes(x: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, ...]:
    q = quantize(x, quantizer)
    return q.codes, q.scales, q.stats.nonfinite, q.stats.saturated


def _values(x: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, ...]:
    fast = quantize_decode(x, quantizer)
    return fast.values, fast.scales


def _line(name: str, what: str, function: Callable, x: torch.Tensor, copy_seconds: float, only_eager: bool) -> None:
    quantizer = QUANTIZERS[name]
    eager = seconds(lambda: function(x, quantizer), x.device)
    start = f"{name:20} {what:16} {x.numel() / eager / 1e6:10.0f}"
    if only_eager or not can_compile(x.device.type):
        print(f"{start} {'-':>13} {copy_seconds / eager:10.2f} {'-':>9}")
        return
    torch.compiler.reset()
    fast = torch.compile(function)
    same = [digest(part) for part in fast(x, quantizer)] == [digest(part) for part in function(x, quantizer)]
    compiled = seconds(lambda: fast(x, quantizer), x.device)
    speed = x.numel() / compiled / 1e6
    told = "same" if same else "DIFFER"
    print(f"{start} {speed:13.0f} {copy_seconds / compiled:10.2f} {eager / compiled:9.1f}  {told}", flush=True)


def seconds(function: Callable[[], object], device: torch.device, calls: int = 30) -> float:
    """Median wall time of a call, after three to warm up."""
    times = []
    for call in range(calls + 3):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        if call >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
