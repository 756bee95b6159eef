"""What the pins cost: decode and a learner's step, against the same engine with the libraries' defaults.

    python benchmarks/pins_price.py [--layers 12] [--batches 32 256] [--json FILE]

Two arms, each in a process of its own, since cuBLAS reads its settings when CUDA starts:
    pinned    as the project runs
    default   cuBLAS with its own workspaces and reduced-precision reductions, and decode attention by the library's
              flash kernel that splits keys as it likes, over 256 keys (the mean of the run)
Everything else is the same: graphs, kernels between the matmuls, shapes of Qwen3-8B, random weights in BF16.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

PROMPT, NEW, TOKENS, LEARNER_LAYERS = 128, 256, 8192, 4


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--json", type=Path, help="add rows to this file")
    parser.add_argument("--arm", choices=("pinned", "default"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args.arm, args.layers, args.batches)))
        return
    found = {}
    for arm in ("default", "pinned"):
        command = [sys.executable, __file__, "--arm", arm, "--layers", str(args.layers), "--batches"]
        output = subprocess.run([*command, *map(str, args.batches)], check=True, capture_output=True, text=True).stdout
        found[arm] = json.loads(output.splitlines()[-1])
    device = found["pinned"].pop("device")
    command = "python benchmarks/pins_price.py " + " ".join(sys.argv[1:])
    rows = []
    for name, ours in found["pinned"].items():
        other = found["default"][name]
        ratio = ours / other
        rows.append(
            {
                "name": f"price of the pins, {name}", "ours": ours, "unit": "ms", "other": other,
                "what": "default cuBLAS, stock split-key flash decode", "ratio": ratio, "target": "<= 1.03",
                "met": ratio <= 1.03, "why": "", "command": command, "device": device,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            }
        )  # fmt: skip
        print(f"{name}: {ours:.3f} ms pinned, {other:.3f} ms default, ratio {ratio:.3f}")
    if args.json:
        old = json.loads(args.json.read_text()) if args.json.exists() else []
        kept = [row for row in old if not row["name"].startswith("price of the pins")]
        args.json.write_text(json.dumps([*kept, *rows], indent=1) + "\n")


def measure(arm: str, layers: int, batches: list[int]) -> dict[str, object]:
    """Milliseconds by name in this process."""
    import torch

    from onegrid.ops import pins

    if arm == "default":
        pins.pin = lambda device="cpu": None  # before anything imports it by name
    from onegrid.ops import table

    if arm == "default":
        from stock_decode import stock_slots  # beside this script

        slots = partial(stock_slots, num_keys=PROMPT + NEW // 2)
        table.TRITON = dataclasses.replace(table.TRITON, slots=slots)
    from onegrid.learner.config import LearnerConfig
    from onegrid.learner.learner import Learner
    from onegrid.study import bench

    device = torch.device("cuda")
    pins.pin(device)
    out: dict[str, object] = {"device": f"{torch.cuda.get_device_name()}, torch {torch.__version__}"}
    engine = bench.engine("qwen3-8b", "bf16", device, slots=max(batches), max_len=PROMPT + NEW, layers=layers)
    for count in batches:
        wanted = bench.requests(count, prompt=PROMPT, new=NEW, vocab=engine.weights.spec.vocab_size)
        engine.generate(wanted[:count])
        took = bench.seconds(partial(engine.generate, wanted), device, repeats=2, warmups=0)
        out[f"{count} sequences of {PROMPT} + {NEW} tokens, {layers} layers of Qwen3-8B"] = took * 1e3
    rollouts = engine.generate(bench.requests(16, prompt=PROMPT, new=NEW, vocab=engine.weights.spec.vocab_size))
    batch = bench.batch_of(rollouts * (TOKENS // 16 // (PROMPT + NEW)))
    del engine
    torch.cuda.empty_cache()
    spec, plan = bench.spec_and_plan("qwen3-8b", "bf16", LEARNER_LAYERS)
    learner = Learner(spec, plan, bench.random_tensors(spec, device), LearnerConfig(max_tokens=TOKENS), device=device)
    num = sum(len(s.tokens_T) - 1 for s in batch.sequences)
    took = bench.seconds(partial(learner.forward_backward, batch), device, repeats=3, warmups=1)
    out[f"learner's forward and backward, {num} tokens, {LEARNER_LAYERS} layers"] = took * 1e3
    return out


if __name__ == "__main__":
    main()
