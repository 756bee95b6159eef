"""Is it one policy at the shape of a real model? Bytes of log-probabilities, learner against sampler, and who is to
blame where they differ: packed weights, the kernels that quantize behind a norm, or graphs.

    python benchmarks/pairing.py --shape qwen3-8b --layers 4 --presets bf16 mxfp8 nvfp4_all --device cuda [--json FILE]

Weights are random. Every preset is synchronized once and then asked with 1, 17, 48 and 256 prompts, so that steps
have 16, 32, 48 and 256 rows; with --prompt 300 keys lie in several chunks. Arms "as it runs" have everything that the
engine chooses; each other arm has one thing taken away. The exit code is 1 where the first arm of a preset has an
unequal byte.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.ops.pins import pin
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.study import bench
from onegrid.sync import push

COUNTS = (1, 17, 48, 256)
ARMS: dict[str, dict[str, Any]] = {
    "as it runs": {},
    "decoded weights": {"weights": "decoded"},
    "norm and quantizer apart": {"fused": False},
    "no graphs": {"capture": False},
}


def main() -> int:
    """Prints a line an arm; one that is equal needs no other arm of its preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(bench.SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--presets", nargs="+", default=["bf16", "mxfp8", "nvfp4_all"])
    parser.add_argument("--new", type=int, default=16, help="tokens of a completion (16)")
    parser.add_argument("--prompt", type=int, default=12, help="tokens of a prompt (12)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    pin(device)
    found = []
    for preset in args.presets:
        spec, plan = bench.spec_and_plan(args.shape, preset, args.layers)
        learner = Learner(spec, plan, bench.random_tensors(spec, device), LearnerConfig(), device=device)
        for arm, settings in ARMS.items():
            began = time.monotonic()
            row = {"preset": preset, "arm": arm} | compare(learner, args.new, args.prompt, **settings)
            found.append(row | {"seconds": time.monotonic() - began})
            print(
                f"{args.shape}, {args.layers} layers, {preset}, {arm}: {row['equal']} of {row['of']} of equal bytes, "
                f"largest difference {row['largest']:.3g} nats, packed: {row['packed']}",
                flush=True,
            )
            if row["equal"] == row["of"]:
                break
        del learner
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["arm"] == "as it runs" and row["equal"] < row["of"] for row in found))


def compare(
    learner: Learner, new: int, prompt: int, *, weights: str = "auto", fused: bool = True, capture: bool = True
) -> dict[str, Any]:
    """How many log-probabilities of an engine with these settings have the learner's bytes."""
    live = LiveWeights(learner.spec, learner.plan, side="sampler", device=learner.device, weights=weights)
    if not fused:
        live.fuses = lambda key, width: None  # type: ignore[method-assign]
    config = SamplerConfig(max_slots=max(COUNTS), max_len=prompt + new, capture=capture, weights=weights)
    engine = Engine(live, config)
    tensors = learner.canonical()
    push(Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=tensors), engine)
    equal = of = 0
    largest = 0.0
    for count in COUNTS:
        rollouts = engine.generate(bench.requests(count, prompt=prompt, new=new, vocab=learner.spec.vocab_size))
        mine = torch.cat(learner.log_probs(bench.batch_of(rollouts))).cpu()
        theirs = torch.cat([rollout.logp_R for rollout in rollouts])
        equal += int((mine.view(torch.int32) == theirs.view(torch.int32)).sum())
        of += theirs.numel()
        largest = max(largest, float((mine - theirs).abs().max()))
    packed = [f"{c.weight} {c.shape} at {c.rows}" for c in live.choices if c.chosen]
    return {"equal": equal, "of": of, "largest": largest, "packed": packed}


if __name__ == "__main__":
    raise SystemExit(main())
