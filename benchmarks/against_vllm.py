"""This engine against vLLM, in one run: decoding with the same weights and prompts, and weight updates by format.

    python benchmarks/against_vllm.py decode --model qwen3-8b --batches 32,256 --json benchmarks/h200.json
    python benchmarks/against_vllm.py update --json benchmarks/h200.json

Each side runs in a process of its own; they get ready together and are timed one after the other, and say what they do
as they go. Decoding: random weights made on the device from one seed, prompts that share nothing, temperature 1, all
log-probabilities kept, whole calls timed, prefill included, after a call of the same size; the median of --repeats.
vLLM runs as it comes, compiled and with graphs, and gets no seeds (its seeded sampling is slower). It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.ops.pins import pin
from onegrid.recipe import PRESETS, resolve
from onegrid.study.bench import SHAPES, Row, engine, random_tensors, requests, row, spec_and_plan
from onegrid.sync import push

_BEGAN = time.perf_counter()


def say(what: str) -> None:
    """A line on stderr as it happens, with the seconds since this process has begun."""
    side = " ".join(sys.argv[sys.argv.index("--child") + 1 :][:2]) if "--child" in sys.argv else "parent"
    print(f"[{time.perf_counter() - _BEGAN:6.1f} s] {side}: {what}", file=sys.stderr, flush=True)


Ready = Callable[[], None]
"""Called when a side is prepared; returns when it is its turn."""


class Filler:
    """Worker extension of vLLM: the random weights of `study.bench`, made in the worker."""

    def onegrid_fill(self, hf_config: dict[str, Any]) -> int:
        """Loads them through the engine's own loader; returns how many tensors."""
        spec = ModelSpec.from_hf_config(hf_config)
        device = next(self.model_runner.get_model().parameters()).device  # type: ignore[attr-defined]
        tensors = random_tensors(spec, device)
        self.model_runner.get_model().load_weights(tensors.items())  # type: ignore[attr-defined]
        return len(tensors)


def median(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call that waits for the device itself; of an even number of calls the faster one in the middle."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    say("timed " + ", ".join(f"{seconds:.4g}" for seconds in times) + " s")
    return sorted(times)[(repeats - 1) // 2]


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The Hugging Face configuration of a shape."""
    layers = {} if options.layers is None else {"num_hidden_layers": options.layers}
    return {"architectures": ["Qwen3ForCausalLM"]} | SHAPES[options.model] | layers


def decode_ours(options: argparse.Namespace, preset: str, ready: Ready) -> dict[str, float]:
    """Tokens per second by batch."""
    device = torch.device(options.device)
    pin(device)
    length, sizes = options.prompt + options.new, options.sizes
    sampler = engine(options.model, preset, device, slots=max(sizes), max_len=length, layers=options.layers)
    vocab = sampler.weights.spec.vocab_size
    ready()
    found = {}
    for count in sizes:
        sampler.generate(requests(count, prompt=options.prompt, new=min(4, options.new), vocab=vocab))
        wanted = requests(count, prompt=options.prompt, new=options.new, vocab=vocab)
        found[str(count)] = (
            count
            * options.new
            / median(
                lambda wanted=wanted: sampler.generate(wanted),  # type: ignore[misc]
                options.repeats,
            )
        )
    return found


def decode_vllm(options: argparse.Namespace, preset: str, ready: Ready) -> dict[str, float]:
    """The same by vLLM; formats but BF16 with whatever random weights it starts with, through the kernel it picks."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    from onegrid.sampler.vllm.wire import quantization_of

    config = config_of(options)
    told: dict[str, Any] = dict(config)
    if preset != "bf16":
        _, plan = spec_and_plan(options.model, preset, options.layers)
        told |= quantization_of(plan, "modelopt").checkpoint
    sizes = options.sizes
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(told))
        # Room for every sequence, said in bytes, so that it does not matter what else is on the device meanwhile.
        memory: dict[str, Any] = {"kv_cache_memory_bytes": (1 if options.device == "cpu" else 24) << 30}
        memory |= {} if options.device == "cpu" else {"gpu_memory_utilization": 0.05}
        llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=options.prompt + options.new,
            max_num_seqs=max(sizes),
            enable_prefix_caching=False,
            worker_extension_cls="benchmarks.against_vllm.Filler",
            generation_config="vllm",
            **memory,
        )
    if preset == "bf16":
        llm.collective_rpc("onegrid_fill", args=(config,))
    ready()
    found = {}
    for count in sizes:
        prompts = [
            {"prompt_token_ids": list(r.prompt_tokens)}
            for r in requests(count, prompt=options.prompt, new=options.new, vocab=config["vocab_size"])
        ]

        def call(new: int = options.new, prompts: list[Any] = prompts) -> None:
            sampling = vllm.SamplingParams(
                temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
            )  # fmt: skip
            done = llm.generate(prompts, sampling, use_tqdm=False)
            made = sum(len(o.outputs[0].token_ids) for o in done)
            assert made == len(prompts) * new and all(o.outputs[0].logprobs for o in done), made

        call(min(4, options.new))
        found[str(count)] = count * options.new / median(call, options.repeats)
    return found


def update_vllm(options: argparse.Namespace, preset: str, ready: Ready) -> dict[str, float]:
    """Seconds of a synchronization into vLLM: transfer with every digest, and with all checks of a training step."""
    from onegrid.guard.config import GuardConfig
    from onegrid.guard.guard import guard_of, guard_sync
    from onegrid.sampler.vllm.adapter import VllmSampler
    from onegrid.sampler.vllm.config import VllmConfig

    config = config_of(options)
    spec = ModelSpec.from_hf_config(config)
    say("makes a learner")
    # What quantizes no inputs: Marlin, which vLLM takes for MXFP8 on Hopper, and the plain engine that a CPU gets.
    rules = tuple(replace(r, sampler_activation=None) for r in PRESETS[preset].rules)
    recipe = replace(PRESETS[preset], rules=rules)
    plan = resolve(recipe, config, tensor_shapes(spec))
    device = torch.device(options.device)
    learner = Learner(spec, plan, random_tensors(spec, device), LearnerConfig(), device=device)
    arguments = {} if options.device == "cpu" else {"gpu_memory_utilization": 0.05}
    road = "decoded" if preset == "bf16" or options.device == "cpu" else "modelopt"
    settings = VllmConfig(
        road=road, kv_cache_bytes=1 << 29, allow_unknown_kernel=True, arguments=arguments  # type: ignore[arg-type]
    )  # fmt: skip
    say("starts vLLM")
    sampler = VllmSampler(spec, config, plan, settings, max_len=128, max_slots=16)
    guard = guard_of(GuardConfig(unknown="record", probe_band=100.0), learner, sampler)

    def plain() -> None:
        learner.version += 1
        push(Snapshot(version=learner.version, plan_digest=plan.digest, tensors=learner.canonical()), sampler)

    def guarded() -> None:
        learner.version += 1
        guard_sync(learner, sampler, guard)

    say("pushes once")
    plain()
    say("pushes once with all checks")
    guarded()
    ready()
    found = {"push": median(plain, options.repeats), "guarded": median(guarded, options.repeats)}
    kernels = sorted({live.kernel for live in sampler.describe().values()})
    say(f"closes; kernels: {', '.join(kernels)}")
    sampler.close()
    return found | {"kernels": kernels}  # type: ignore[dict-item]


SIDES = {"ours": decode_ours, "vllm": decode_vllm, "update": update_vllm}


def children(options: argparse.Namespace, sides: list[tuple[str, str]]) -> list[dict[str, Any] | None]:
    """What each (side, preset) found; None, and its last words printed, for one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{i}.json" for i in range(len(sides))]
        logs = [out.with_suffix(".log").open("w+") for out in outs]
        # Each side its share of the cores: more threads than cores wait for each other.
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // len(sides)))} | os.environ
        running = [
            subprocess.Popen([sys.executable, *sys.argv, "--child", *side, str(out)], stdout=log, env=threads)
            for side, out, log in zip(sides, outs, logs, strict=True)
        ]
        while any(
            p.poll() is None and not out.with_suffix(".ready").exists() for p, out in zip(running, outs, strict=True)
        ):
            time.sleep(0.2)
        while options.hold and not options.hold.exists():
            time.sleep(0.2)
        found: list[dict[str, Any] | None] = []
        for side, process, out, log in zip(sides, running, outs, logs, strict=True):
            out.with_suffix(".go").touch()
            process.wait()
            log.seek(0)
            last = log.read()[-3000:]
            log.close()
            found.append(json.loads(out.read_text()) if out.exists() else None)
            print(f"{' '.join(side)}: {last if found[-1] is None else found[-1]}", flush=True)
    return found


def turn_of(out: Path) -> Ready:
    """For a child: tells that it is ready, and waits for its turn."""

    def ready() -> None:
        say("ready")
        out.with_suffix(".ready").touch()
        while not out.with_suffix(".go").exists():
            time.sleep(0.1)
        say("times")

    return ready


def decode(options: argparse.Namespace) -> list[Row]:
    """Rows of the decode comparison."""
    rows = []
    size = f"{options.model}" + (f", {options.layers} layers" if options.layers else "")
    for preset in options.presets.split(","):
        theirs, ours = children(options, [("vllm", preset), ("ours", preset)])
        for count in options.sizes if ours else ():
            assert ours is not None
            name = f"decode {size} {preset}, {count} sequences, prompt {options.prompt}, {options.new} new, same run"
            least = 1.2 if preset == "bf16" else None
            other = theirs[str(count)] if theirs else None
            rows.append(row(name, ours[str(count)], "tokens/s", other, "vLLM, same weights and run", least=least))
    return rows


def update(options: argparse.Namespace) -> list[Row]:
    """Rows of the update comparison."""
    other, ours = children(options, [("update", "bf16"), ("update", "mxfp8")])
    if ours is None or other is None:
        return []
    told = {"push": "every digest, from the kernels' storage", "guarded": "all checks of a training step"}
    return [
        row(
            f"vLLM update {options.model} mxfp8, {what}",
            ours[key] * 1e3,
            "ms",
            other[key] * 1e3,
            "vLLM update in bf16",
            most=1.3,
        )
        for key, what in told.items()
    ]


def main() -> None:
    """Measures, prints, and adds rows to a file that may hold others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("decode", "update"))
    parser.add_argument("--model", choices=list(SHAPES), help="qwen3-8b for decode, qwen3-0.6b for update")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--presets", default="bf16")
    parser.add_argument("--batches", default="32,256")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hold", type=Path, help="Begin to time when this file exists.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model or {"decode": "qwen3-8b", "update": "qwen3-0.6b"}[options.what]
    options.sizes = [int(count) for count in options.batches.split(",")]
    if options.child:
        side, preset, out = options.child
        Path(out).write_text(json.dumps(SIDES[side](options, preset, turn_of(Path(out)))))
        return
    rows = decode(options) if options.what == "decode" else update(options)
    where = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    about = {"command": "python " + " ".join(sys.argv), "device": f"{where}, torch {torch.__version__}"}
    about |= {"date": time.strftime("%Y-%m-%d")}
    for one in rows:
        print(json.dumps(asdict(one)))
    if options.json:
        old = json.loads(options.json.read_text()) if options.json.exists() else []
        kept = [entry for entry in old if entry["command"] != about["command"]]
        options.json.write_text(json.dumps([*kept, *(asdict(r) | about for r in rows)], indent=1) + "\n")


if __name__ == "__main__":
    main()
