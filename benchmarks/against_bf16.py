"""MXFP8 against BF16 on this machine: learner steps, sampling, memory. Ratios within one run, the two in turn.

    python benchmarks/against_bf16.py [--rounds 5] [--only quickstart|large|sampler|memory]

`large` is a dense model of about 100 million weights. Each figure is the median over rounds; a ratio is the median of
the ratios of neighbouring runs, so that a machine that slows down meanwhile changes it little.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.ops.memory import keep_freed_memory
from onegrid.recipe import preset, resolve
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.study.start import MODELS, random_weights
from onegrid.sync import push
from onegrid.types import Batch, Request, Sampling, Sequence

LARGE = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
ROOT = Path(__file__).parent.parent


def learner_of(config: dict, recipe: str, backward: str | None) -> Learner:
    """A learner with random weights."""
    spec = ModelSpec.from_hf_config(config)
    plan = resolve(preset(recipe), config, tensor_shapes(spec), backward=backward)
    return Learner(spec, plan, random_weights(spec, 0), LearnerConfig(lr=1e-5))


def batch_of(count: int, prompt: int, response: int, vocab: int) -> Batch:
    """Random sequences of one length."""
    generator = torch.Generator().manual_seed(0)
    sequences = [
        Sequence(
            tokens_T=torch.randint(0, vocab, (prompt + response,), generator=generator),
            num_prompt=prompt,
            sampler_logp_R=torch.full((response,), -3.0),
            version_R=torch.zeros(response, dtype=torch.int64),
            advantage_R=torch.randn(response, generator=generator),
            mask_R=torch.ones(response, dtype=torch.bool),
            group_id=i,
        )
        for i in range(count)
    ]
    return Batch(sequences=tuple(sequences))


def in_turn(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round, the arms one after another."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, run in arms.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in seconds.items()}


def show(title: str, seconds: dict[str, list[float]], num_tokens: int) -> None:
    """One line an arm, against the first."""
    first = next(iter(seconds.values()))
    print(title)
    for name, times in seconds.items():
        ratio = statistics.median(t / f for t, f in zip(times, first, strict=True))
        median = statistics.median(times)
        print(
            f"  {name:<22} {median:8.3f} s  {num_tokens / median:9.0f} tokens/s  {ratio:5.2f} x {next(iter(seconds))}"
        )


def learner_step(title: str, config: dict, batch: Batch, rounds: int, backwards: list[str]) -> None:
    """Forward, backward and update."""
    arms = {"bf16": learner_of(config, "bf16", None)}
    arms |= {f"mxfp8 {backward}": learner_of(config, "mxfp8", backward) for backward in backwards}

    def step(learner: Learner) -> None:
        learner.forward_backward(batch)
        learner.step()

    runs = {name: (lambda learner=learner: step(learner)) for name, learner in arms.items()}
    rows = sum(len(s.tokens_T) - 1 for s in batch.sequences)
    show(f"learner step, {title}, {rows} tokens", in_turn(runs, rounds), rows)


def sampler(rounds: int) -> None:
    """512 completions of the quickstart's shape."""
    config = MODELS["moe"]
    arms = {}
    for recipe in ("bf16", "mxfp8"):
        learner = learner_of(config, recipe, None)
        engine = Engine(
            LiveWeights(learner.spec, learner.plan, side="sampler"), SamplerConfig(max_slots=512, max_len=64)
        )
        push(Snapshot(version=0, plan_digest=learner.plan.digest, tensors=learner.canonical()), engine)
        arms[recipe] = engine
    sampling = Sampling(max_new_tokens=16)
    requests = [
        Request(prompt_index=i // 8, sample=i % 8, prompt_tokens=tuple(range(1, 9)), seed=i // 8, sampling=sampling)
        for i in range(512)
    ]
    runs = {name: (lambda engine=engine: engine.generate(requests)) for name, engine in arms.items()}
    show("sampler, mixture of experts of the quickstart, 512 completions of 16", in_turn(runs, rounds), 512 * 16)


def memory() -> None:
    """Peak resident memory of two steps of the quickstart, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from onegrid.cli import main; main()", "train"]
        command += [
            str(ROOT / "configs" / "quickstart.toml"),
            "--steps",
            "3",
            "--run-dir",
            f"{folder}/run",
            "device=cpu",
        ]
        subprocess.run(command, check=True, capture_output=True)
        last = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"quickstart, peak resident memory {peak / 2**30:.2f} GiB; step {last['perf/step_seconds']:.2f} s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("quickstart", "large", "sampler", "memory"))
    args = parser.parse_args()
    chosen = (args.only,) if args.only else ("memory", "quickstart", "sampler", "large")
    keep_freed_memory()  # as `onegrid train` does
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if "memory" in chosen:
        memory()
    if "quickstart" in chosen:
        batch = batch_of(512, 7, 4, 16)
        modes = ["dequantized", "high_precision", "quantized"]
        learner_step("quickstart's mixture of experts", MODELS["moe"], batch, args.rounds, modes)
    if "sampler" in chosen:
        sampler(args.rounds)
    if "large" in chosen:
        batch = batch_of(8, 32, 97, 8192)
        learner_step("dense, 100 million", LARGE, batch, max(2, args.rounds // 2), ["dequantized", "quantized"])


if __name__ == "__main__":
    main()
