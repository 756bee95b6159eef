"""How fast a checkpoint is converted, against reading and writing as many bytes and doing nothing else.

    python benchmarks/convert.py FOLDER [--mib 2048] [--recipe mxfp8]

FOLDER must be on the disk in question. A random BF16 checkpoint of two shards is written there. "disk and copy" reads
it, in pieces, and writes as many bytes as the converted checkpoint has, made durable, with the file cache as the
conversion finds it; the conversion then runs in a process of its own, whose peak memory is compared with the largest
shard. The bound: a core quantizes at the speed printed as "one core"; two of them are the most a conversion can use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from onegrid.convert.by_rows import quantize_by_rows
from onegrid.convert.convert import convert
from onegrid.formats import QUANTIZERS
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import save_weights
from onegrid.recipe import PRESETS

PIECE = 8 << 20
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def make(folder: Path, mib: int) -> int:
    """A checkpoint of about `mib` in two shards; returns its bytes."""
    one = sum(2 * torch.Size(s).numel() for s in tensor_shapes(spec_of(1)).values())
    two = sum(2 * torch.Size(s).numel() for s in tensor_shapes(spec_of(2)).values())
    spec = spec_of(max(1, ((mib << 20) - one) // (two - one) + 1))
    tensors = {n: (torch.randn(s) * 0.02).to(torch.bfloat16) for n, s in tensor_shapes(spec).items()}
    total = sum(x.nbytes for x in tensors.values())
    save_weights(tensors, spec.to_hf_config(), folder, max_shard_bytes=total // 2 + (16 << 20))
    return total


def spec_of(num_layers: int) -> ModelSpec:
    """The shape with so many layers."""
    return ModelSpec.from_hf_config(CONFIG | {"num_hidden_layers": num_layers})


def copy_seconds(source: Path, target: Path, out_bytes: int) -> float:
    """Reads every byte of the source's shards and writes `out_bytes`, durable."""
    began = time.perf_counter()
    left = out_bytes
    with target.open("wb") as out:
        for file in sorted(source.glob("*.safetensors")):
            with file.open("rb") as data:
                while piece := data.read(PIECE):
                    out.write(piece[: min(left, len(piece))])
                    left -= min(left, len(piece))
        out.write(b"\0" * left)
        out.flush()
        os.fsync(out.fileno())
    took = time.perf_counter() - began
    target.unlink()
    return took


def child(source: Path, target: Path, recipe: str) -> None:
    """One conversion; prints seconds, bytes, and its peak of memory that is no file's, watched every 3 ms."""
    before, peak, running = anonymous_bytes(), [0], [True]

    def watch() -> None:
        while running:
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.003)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    layout = "modelopt" if recipe in ("mxfp8", "nvfp4_all", "fp8_tensor") else "compressed-tensors"
    report = convert(source, target, PRESETS[recipe], layout=layout, threads=2)
    took = time.perf_counter() - began
    running.clear()
    watcher.join()
    print(json.dumps({"seconds": took, "bytes": report.num_bytes, "peak": peak[0] - before}))


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind (Linux)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def main() -> None:
    """Makes, copies, converts, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    source, target = options.folder / "bf16", options.folder / "converted"
    if options.child:
        child(source, target, options.recipe)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    total = make(source, options.mib)
    shards = [file.stat().st_size for file in source.glob("*.safetensors")]
    x = (torch.randn(2048, 4096) * 0.02).to(torch.bfloat16)
    torch.set_num_threads(1)
    planned = next(r.weight for r in PRESETS[options.recipe].rules if r.weight)
    core = []
    for _ in range(5):
        began = time.perf_counter()
        quantize_by_rows(x, QUANTIZERS[planned], None)
        core.append(time.perf_counter() - began)
    ratios = []
    for _ in range(3):
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, __file__, str(options.folder), "--recipe", options.recipe, "--child"]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        plain = copy_seconds(source, options.folder / "copy", found["bytes"])
        ratios.append(plain / found["seconds"])
        print(
            f"{total / 1e9:.2f} GB to {found['bytes'] / 1e9:.2f} GB of {options.recipe}: {found['seconds']:.2f} s, "
            f"{total / found['seconds'] / 1e9:.2f} GB/s read; disk and copy {plain:.2f} s, "
            f"{total / plain / 1e9:.2f} GB/s; ratio {ratios[-1]:.2f} (target 0.60); peak memory "
            f"{found['peak'] / 1e9:.2f} GB, {found['peak'] / max(shards):.2f} of the largest shard (target 1.5)",
            flush=True,
        )
    print(f"one core quantizes {x.nbytes / sorted(core)[2] / 1e9:.2f} GB/s; median ratio {sorted(ratios)[1]:.2f}")
    shutil.rmtree(source)
    shutil.rmtree(target)


if __name__ == "__main__":
    main()
