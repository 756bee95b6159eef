"""How far apart learner and sampler are, arm by arm, at fixed weights, with vLLM as sampler.

    python benchmarks/matching.py CHECKPOINT --out benchmarks/matching_cpu.json

Every arm is a pairing: what the learner computes in, and what the sampler does. The sampler gets the learner's weights
by a proved synchronization and samples completions of the same prompts, and the learner computes the log-probabilities
of those tokens. KL(sampler to learner) is estimated twice, with the paired bootstrap over prompts: k1, the mean of -d,
as published figures have it, and k3, the mean of exp(d) - 1 - d, which has the same expectation and far less variance
(Schulman, "Approximating KL divergence", 2020).

An arm that says "inputs" quantizes, inside vLLM's own forward, what goes into each quantized linear, by this package's
definition, in front of a BF16 product of decoded weights: vLLM has no kernel for these formats on a CPU or a Hopper GPU
that quantizes activations. Values whose scale is no power of two are then rounded once more, to BF16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onegrid.formats import QUANTIZERS, dequantize, quantize
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.mismatch.metrics import compare
from onegrid.mismatch.statistics import PromptSums, kl_reduction, sum_by_prompt
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.spec import ModelSpec
from onegrid.model.weights import load_weights, read_index
from onegrid.recipe import Plan, Recipe, Rule, resolve
from onegrid.rl.batch import group_rollouts, make_requests, pack
from onegrid.rl.tasks import ArithmeticTask
from onegrid.rl.tokenizer import load_tokenizer, stop_tokens
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from onegrid.types import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One pairing. Formats are names of quantizers, None for BF16."""

    learner: tuple[str | None, str | None]
    """Weight and activation."""
    sampler: tuple[str | None, str | None]
    """Weight in the sampler, and what the inputs of its linears are quantized to."""
    half: bool = False
    """gate_proj and up_proj stay BF16 in the sampler."""
    road: str = "decoded"
    """See `sampler.vllm.config.VllmConfig.road`; "embedded" for the engine of this package."""
    inputs: bool = True
    """Whether this script quantizes the inputs in front of vLLM's linears; False: its own kernel does, or nobody."""
    gpu: bool = False
    """Needs a kernel that only GPUs have."""


MX = ("mxfp8", "mxfp8")
POW2, FP32 = ("fp8_128x128", "fp8_1x128"), ("fp8_128x128_fp32", "fp8_1x128_fp32")
FP4 = ("nvfp4", "nvfp4_row")
ARMS: dict[str, Arm] = {
    "mxfp8 / mxfp8 embedded": Arm(learner=MX, sampler=MX, road="embedded"),
    "nvfp4 / nvfp4 embedded": Arm(learner=FP4, sampler=FP4, road="embedded"),
    "bf16 / bf16": Arm(learner=(None, None), sampler=(None, None)),
    "mxfp8 / bf16": Arm(learner=MX, sampler=(None, None)),
    "mxfp8 / half mxfp8 inputs": Arm(learner=MX, sampler=MX, half=True),
    "mxfp8 / mxfp8 inputs": Arm(learner=MX, sampler=MX),
    "mxfp8 / decoded": Arm(learner=MX, sampler=("mxfp8", None)),
    "fp8 block / fp8 block inputs": Arm(learner=POW2, sampler=POW2),
    "fp8 block / other scales inputs": Arm(learner=POW2, sampler=FP32),
    "nvfp4 / nvfp4 inputs": Arm(learner=FP4, sampler=FP4),
    "nvfp4 / decoded": Arm(learner=FP4, sampler=("nvfp4", None)),
    "nvfp4 / bf16": Arm(learner=FP4, sampler=(None, None)),
    "mxfp8 / marlin": Arm(learner=MX, sampler=("mxfp8", None), road="compressed-tensors", inputs=False, gpu=True),
    "nvfp4 / marlin": Arm(learner=FP4, sampler=("nvfp4", None), road="compressed-tensors", inputs=False, gpu=True),
    "fp8 block fp32 / vllm block": Arm(learner=FP32, sampler=FP32, road="deepseek", inputs=False, gpu=True),
    "fp8 block / vllm block": Arm(learner=POW2, sampler=FP32, road="deepseek", inputs=False, gpu=True),
    "fp8 block fp32 / same inputs": Arm(learner=FP32, sampler=FP32),
    "fp8 block fp32 / decoded": Arm(learner=FP32, sampler=(FP32[0], None)),
}
CLAIMS = [
    ("mxfp8 / bf16", "bf16 / bf16"),
    ("mxfp8 / bf16", "mxfp8 / half mxfp8 inputs"),
    ("mxfp8 / half mxfp8 inputs", "mxfp8 / mxfp8 inputs"),
    ("mxfp8 / bf16", "mxfp8 / mxfp8 inputs"),
    ("mxfp8 / bf16", "mxfp8 / decoded"),
    ("mxfp8 / decoded", "mxfp8 / mxfp8 inputs"),
    ("mxfp8 / bf16", "mxfp8 / marlin"),
    ("fp8 block / other scales inputs", "fp8 block / fp8 block inputs"),
    ("fp8 block / vllm block", "fp8 block fp32 / vllm block"),
    ("nvfp4 / bf16", "nvfp4 / nvfp4 inputs"),
    ("nvfp4 / bf16", "nvfp4 / decoded"),
    ("nvfp4 / bf16", "nvfp4 / marlin"),
    ("nvfp4 / nvfp4 inputs", "nvfp4 / decoded"),
    ("fp8 block fp32 / decoded", "fp8 block fp32 / same inputs"),
    ("fp8 block fp32 / same inputs", "fp8 block fp32 / vllm block"),
]
"""First and second arm of each comparison: by how much is the second one's KL lower?"""


def plan_of(arm: Arm, hf_config: dict[str, Any], folder: Path) -> Plan:
    """The plan of both sides.

    Where this script quantizes the inputs, or nobody does, the plan says BF16 for them. Marlin keeps them in BF16.
    vLLM's kernels read one global factor for q, k and v together, so on the way to them NVFP4's is shared.
    """
    weight, activation = arm.learner
    own = arm.road != "decoded"
    there = {"sampler_weight": arm.sampler[0], "sampler_activation": arm.sampler[1] if own else None}
    backward = None if weight is None else "dequantized"
    rest = Rule(match="**", weight=None, activation=None, optional=True)
    linear = Rule(kinds=("linear",), weight=weight, activation=activation, backward=backward, **there)  # type: ignore[arg-type]
    left = [
        Rule(match=f"layers.*.mlp.{name}", weight=weight, activation=activation, backward=backward,
             sampler_weight=None, sampler_activation=None)
        for name in ("gate_proj", "up_proj")
    ]  # fmt: skip
    rules = (rest,) if weight is None else (*(left if arm.half else []), linear, rest)
    shared = arm.road not in ("decoded", "embedded")
    recipe = Recipe(name="arm", source="benchmarks/matching.py", rules=rules, share_qkv_amax=shared)
    return resolve(recipe, hf_config, read_index(folder))


def quantize_inputs(sampler: Any, arm: Arm) -> int:
    """Puts the quantizer of the arm in front of vLLM's linears. Returns how many."""
    assert arm.sampler[1] is not None
    quantizer = QUANTIZERS[arm.sampler[1]]
    wanted = ("qkv_proj", "o_proj", "down_proj", *(() if arm.half else ("gate_up_proj",)))

    def before(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        flat = x.reshape(-1, x.shape[-1])
        return (dequantize(quantize(flat, quantizer), torch.float32).to(x.dtype).view(x.shape), *others)

    def install(model: Any) -> int:
        found = [m for name, m in model.named_modules() if name.rpartition(".")[2] in wanted]
        for module in found:
            module.register_forward_pre_hook(before)
        return len(found)

    return int(sampler.engine.engine.apply_model(install)[0])


class Clock:
    """Seconds by phase: each phase is from the end of the one before."""

    def __init__(self) -> None:
        self.began, self.seconds = time.perf_counter(), dict[str, float]()

    def end(self, phase: str) -> None:
        """Of `phase`."""
        now = time.perf_counter()
        self.seconds[phase], self.began = now - self.began, now


def run_arm(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Sums per prompt and metrics of one arm."""
    clock = Clock()
    arm, folder, device = ARMS[name], options.checkpoint, options.device
    hf_config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec.from_hf_config(hf_config)
    plan = plan_of(arm, hf_config, folder)
    tokenizer = load_tokenizer(folder)
    task = ArithmeticTask(tokenizer, num_prompts=options.prompts, seed=0, digits=options.digits)
    sampling = Sampling(max_new_tokens=options.new, stop_token_ids=() if options.free else stop_tokens(folder))
    prompts = task.prompts(0)
    max_len = 16 * -(-(max(len(p.tokens) for p in prompts) + options.new) // 16)
    weights = load_weights(folder, spec)
    clock.end("read")
    learner = Learner(spec, plan, weights, LearnerConfig(max_tokens=8192), device=device)
    clock.end("learner")
    if arm.road == "embedded":
        live = LiveWeights(spec, plan, side="sampler", device=device)
        sampler: Any = Engine(live, SamplerConfig(max_slots=options.slots, max_len=max_len))
    else:
        sampler = vllm_sampler(spec, hf_config, plan, arm, options, max_len)
    clock.end("engine")
    push(Snapshot(version=0, plan_digest=plan.digest, tensors=learner.canonical()), sampler)
    clock.end("push")
    hooked = 0
    if arm.road != "embedded" and arm.inputs and arm.sampler[1] is not None:
        hooked = quantize_inputs(sampler, arm)
        assert hooked == spec.num_layers * (3 if arm.half else 4), hooked
    rollouts = sampler.generate(make_requests(prompts, options.samples, seed=options.seed, sampling=sampling))
    clock.end("sample")
    kernels = sorted({live.kernel for live in sampler.describe().values()})
    clock.end("describe")
    if arm.road != "embedded":
        sampler.close()
    batch = pack(group_rollouts(rollouts), [0.0] * len(rollouts))
    with torch.no_grad():
        logp = learner.log_probs(batch)
    clock.end("log-probs")
    sequences = batch.sequences
    theirs, masks = [s.sampler_logp_R for s in sequences], [s.mask_R for s in sequences]
    apart = compare(logp, theirs, masks)
    d = [p.cpu().double() - q.double() for p, q in zip(logp, theirs, strict=True)]
    ids = [s.group_id for s in sequences]
    k1, k3 = (sum_by_prompt(x, ids, mask=masks) for x in ([-x for x in d], [x.expm1() - x for x in d]))
    return {
        "metrics": apart,
        "ids": k1.prompt_ids_P.tolist(),
        "k1": k1.total_P.tolist(),
        "k3": k3.total_P.tolist(),
        "counts": k1.num_tokens_P.tolist(),
        "linears_with_quantized_inputs": hooked,
        "kernels": kernels,
        "phases": clock.seconds,
    }


def vllm_sampler(spec: ModelSpec, hf_config: dict[str, Any], plan: Plan, arm: Arm, options: Any, max_len: int) -> Any:
    """vLLM with a plan, eager."""
    from onegrid.sampler.vllm.adapter import VllmSampler
    from onegrid.sampler.vllm.config import VllmConfig

    arguments = {} if options.device == "cpu" else {"gpu_memory_utilization": 0.05}
    config = VllmConfig(
        road=arm.road, kv_cache_bytes=1 << 29, allow_unknown_kernel=True, arguments=arguments  # type: ignore[arg-type]
    )  # fmt: skip
    return VllmSampler(spec, hf_config, plan, config, max_len=max(64, max_len), max_slots=options.slots)


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """What an arm's result depends on, beside the arm."""
    names = ("checkpoint", "device", "prompts", "samples", "new", "digits", "slots", "seed", "free")
    return {name: str(getattr(options, name)) for name in names}


def threads_of(jobs: int) -> dict[str, str]:
    """The environment for one of `jobs` processes: its share of the cores, where it does not say how many threads.

    Each would start as many as there are cores, and they wait for each other: on the 16 cores of an H200 machine 8
    processes took 150 s to read a model of 135M.
    """
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))} | os.environ


def sums_of(found: dict[str, Any], estimator: str) -> PromptSums:
    """What `run_arm` wrote, as statistics take it. Estimator "k1", "k3", or "nothing": 0 for every token."""
    totals = found.get(estimator, [0.0] * len(found["ids"]))
    return PromptSums(
        prompt_ids_P=np.array(found["ids"], dtype=np.int64),
        total_P=np.array(totals, dtype=np.float64),
        num_tokens_P=np.array(found["counts"], dtype=np.int64),
    )


def conclusions(found: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows by arm with intervals, and the claims whose two arms are there."""
    rows, claims = [], []
    for name, one in found.items():
        row: dict[str, Any] = {"arm": name, "num_prompts": len(one["ids"]), "num_tokens": int(sum(one["counts"]))}
        for key in ("k1", "k3"):
            kl = kl_reduction(sums_of(one, key), sums_of(one, "nothing"), seed=0).absolute
            row |= {key: kl.estimate, f"{key}_low": kl.low, f"{key}_high": kl.high}
        row |= {k: v for k, v in one["metrics"].items() if k.startswith("mismatch/")}
        rows.append(row | {k: one[k] for k in ("linears_with_quantized_inputs", "kernels", "seconds")})
    for first, second in CLAIMS:
        for key in ("k1", "k3") if first in found and second in found else ():
            reduction = kl_reduction(sums_of(found[first], key), sums_of(found[second], key), seed=0)
            relative = None if reduction.relative is None else asdict(reduction.relative)
            claim = {"second": second, "lower_than": first, "by": key, "holds": reduction.absolute.low > 0}
            claims.append(claim | {"reduction": relative, "absolute": asdict(reduction.absolute)})
    return rows, claims


def main() -> None:
    """All arms that the device can run, a table and a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arms", default="", help="Comma-separated; all that the device can run, if none is named.")
    parser.add_argument("--prompts", type=int, default=576)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new", type=int, default=5)
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--free", action="store_true", help="Sample on after the end of the answer, up to --new tokens."
    )
    parser.add_argument("--jobs", type=int, default=1, help="Processes that share the arms.")
    parser.add_argument(
        "--keep", type=Path, help="Folder of what arms found; those there with these options do not run."
    )
    parser.add_argument("--child", nargs=2, metavar=("ARMS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for name in options.child[0].split("|"):
            began = time.perf_counter()
            try:
                found = run_arm(name, options) | {"failed": ""}
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
            found |= {"seconds": time.perf_counter() - began, "settings": settings_of(options)}
            kept = Path(options.child[1]) / f"{list(ARMS).index(name)}.json"
            kept.with_suffix(".part").write_text(json.dumps(found))
            kept.with_suffix(".part").rename(kept)
            told = found["failed"] or f"kl {found['metrics']['mismatch/kl']:.3g}"
            phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found.get("phases", {}).items())
            print(f"arm {name}: {told}, {found['seconds']:.1f} s ({phases})", flush=True)
        return
    names = [n for n in options.arms.split(",") if n]
    names = names or [n for n, a in ARMS.items() if options.device != "cpu" or not a.gpu]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = str(options.keep or temporary)
        Path(scratch).mkdir(parents=True, exist_ok=True)
        files = {name: Path(scratch) / f"{list(ARMS).index(name)}.json" for name in names}
        kept = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        good = [n for n, one in kept.items() if not one["failed"] and one["settings"] == settings_of(options)]
        due = [name for name in names if name not in good]
        for name in due:
            files[name].unlink(missing_ok=True)
        jobs = max(1, min(options.jobs, len(due)))
        ended: dict[str, int] = {}

        def some(mine: list[str]) -> None:
            command = [sys.executable, *sys.argv, "--child", "|".join(mine), scratch]
            running = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=threads_of(jobs)
            )
            lines = []
            for line in running.stdout or ():
                lines.append(line)
                if line.startswith("arm "):
                    print(line, end="", flush=True)
            if running.wait():
                print("".join(lines)[-3000:], flush=True)
                ended.update(dict.fromkeys(mine, running.returncode))

        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(some, [mine for i in range(jobs) if (mine := due[i::jobs])]))
        results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    died = {name: f"its process ended, exit status {ended.get(name)} (below 0: that signal)" for name in names}
    failed = {name: results[name]["failed"] if name in results else died[name] for name in names}
    failed = {name: why for name, why in failed.items() if why}
    results = {name: one for name, one in results.items() if name not in failed}
    rows, claims = conclusions(results)
    device = (
        torch.cuda.get_device_name() if options.device != "cpu" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    )
    print(
        f"\n{'learner / sampler':32} {'k1':>10} {'k3':>10} {'95 % of k3':>21} {'max |d|':>8} {'equal':>7} {'tokens':>7}"
    )
    for row in rows:
        print(
            f"{row['arm']:32} {row['k1']:10.3g} {row['k3']:10.3g} {row['k3_low']:10.3g} {row['k3_high']:10.3g} "
            f"{row['mismatch/max_abs']:8.3g} {row['mismatch/share_equal']:7.1%} {row['num_tokens']:7}"
        )
    for claim in claims:
        low = "lower" if claim["holds"] else "not lower"
        part = claim["reduction"]
        told = "" if part is None else f", by {part['estimate']:.1%} ({part['low']:.1%} to {part['high']:.1%})"
        print(f"{claim['by']}: {claim['second']} is {low} than {claim['lower_than']}{told}")
    if options.out:
        about = {"command": "python " + " ".join(sys.argv), "device": device, "date": time.strftime("%Y-%m-%d")}
        about |= {"model": options.checkpoint.name, "torch": torch.__version__}
        kept = {"about": about, "arms": rows, "claims": claims, "failed": failed}
        options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
