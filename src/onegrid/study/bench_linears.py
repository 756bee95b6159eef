"""Speed of a learner's linears by recipe, of its host, and of mixtures of experts in graphs: ratios in one run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.ops.table import kernels_for
from onegrid.recipe import PRESETS, Plan, resolve
from onegrid.study import bench
from onegrid.study.bench import Row, graph_seconds, row, seconds
from onegrid.study.parts import prove_pins
from onegrid.types import Batch

NATIVE = ("fp8_block", "fp8_tensor")
"""Presets whose dense linears have native products on Hopper."""


def plan_of(shape: str, preset: str, *, native: bool, **change: object) -> tuple[ModelSpec, Plan]:
    """Spec and plan of a shape with some of its settings replaced."""
    config = bench.SHAPES[shape] | change
    spec = ModelSpec.from_hf_config(config)
    recipe = dataclasses.replace(PRESETS[preset], matmul="native" if native else "grid")
    return spec, resolve(recipe, config, tensor_shapes(spec))


def bench_linears(shape: str, device: torch.device, *, tokens: int) -> Iterator[Row]:
    """Forward and backward of the seven linears of one layer, in BF16, and native FP8 where there is any; then where
    the two cross, from few tokens up. On a GPU in graphs, as a captured micro-batch runs them."""
    sizes = [tokens] if device.type != "cuda" else [tokens, 256, 512, 1024, 2048]
    took: dict[tuple[str, int], float] = {}
    for preset in ("bf16", *(NATIVE if device.type == "cuda" else ("fp8_block",)), "mxfp8"):
        native = preset in NATIVE and device.type == "cuda"
        spec, plan = plan_of(shape, preset, native=native, num_hidden_layers=1, vocab_size=1024)
        learner = Learner(spec, plan, bench.random_tensors(spec, device), LearnerConfig(), device=device)
        for master in learner.masters.values():  # gradients are summed in place, as by a captured micro-batch
            master.grad = torch.zeros_like(master)
        for size in sizes:
            took[preset, size] = graph_seconds(partial(_linears, learner, _inputs(spec, device, size)), device)
        del learner
    for (preset, size), ours in took.items():
        if preset == "bf16":
            continue
        least = 1.25 if (preset, size) == ("fp8_block", tokens) and device.type == "cuda" else None
        name = f"linears of {shape}, forward and backward, {size} tokens: bf16 over {preset}"
        yield row(name, took["bf16", size] * 1e3, "ms in bf16", ours * 1e3, f"ms in {preset}", least=least)


def _inputs(spec: ModelSpec, device: torch.device, tokens: int) -> dict[str, Tensor]:
    """BF16 inputs, and gradients of outputs, by projection."""
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = {"h": spec.hidden_size, "out": heads, "mid": spec.intermediate_size}
    grads = {"q": heads, "k": groups, "v": groups, "o": spec.hidden_size, "down": spec.hidden_size}
    grads |= {"gate": spec.intermediate_size, "up": spec.intermediate_size}
    made = {name: torch.randn(tokens, n, device=device).bfloat16().requires_grad_() for name, n in widths.items()}
    return made | {f"d{name}": torch.randn(tokens, n, device=device).bfloat16() for name, n in grads.items()}


def _linears(learner: Learner, x: dict[str, Tensor]) -> None:
    at, weights = "model.layers.0", learner.grad_weights
    q, k, v = weights.linear(tuple(f"{at}.self_attn.{name}_proj.weight" for name in "qkv"), x["h"])
    (o,) = weights.linear((f"{at}.self_attn.o_proj.weight",), x["out"])
    gate, up = weights.linear((f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"), x["h"])
    (down,) = weights.linear((f"{at}.mlp.down_proj.weight",), x["mid"])
    names = ("q", "k", "v", "o", "gate", "up", "down")
    torch.autograd.backward([q, k, v, o, gate, up, down], [x[f"d{name}"] for name in names])


def bench_host(shape: str, presets: list[str], device: torch.device, *, layers: int | None) -> Iterator[Row]:
    """Seconds of the host in one micro-batch of few tokens, over those in BF16: what low precision costs it."""
    baseline: float | None = None
    for preset in presets:
        native = preset in NATIVE and device.type == "cuda"
        change = {} if layers is None else {"num_hidden_layers": layers}
        spec, plan = plan_of(shape, preset, native=native, **change)
        config = LearnerConfig(capture=True)
        learner = Learner(spec, plan, bench.random_tensors(spec, device), config, device=device)
        batch = few_tokens(spec)
        for _ in range(3):  # the first runs as it is, the second captures
            _host_seconds(learner, batch, device)
        spent = sorted(_host_seconds(learner, batch, device) for _ in range(7))[3]
        baseline = spent if preset == "bf16" else baseline
        if preset != "bf16" and baseline is not None:
            name = f"host, micro-batch of {shape} in {preset}{' native' if native else ''}, {spec.num_layers} layers"
            extra = (spent - baseline) * 1e3
            made = row(name, spent * 1e3, "ms", baseline * 1e3, "bf16", why=f"{extra:.2f} ms extra")
            if device.type == "cuda":
                made = dataclasses.replace(made, target="<= 2 ms extra", met=extra <= 2.0)
            yield made
        del learner


def bench_pins(shape: str, device: torch.device, *, tokens: int) -> Iterator[Row]:
    """The proof at start-up for a shape: as a process meets it, kernels compiled or in a cache, and once more."""
    spec, _ = plan_of(shape, "bf16", native=False)
    kernels = kernels_for(device, num_heads=spec.num_heads, num_groups=spec.num_kv_heads, head_dim=spec.head_dim)
    for when in ("first", "again"):
        proof = prove_pins(spec, kernels, str(device), max_tokens=tokens)
        why = f"{proof.operations} operations" + (f", FAILED: {', '.join(proof.failed)}" if proof.failed else "")
        most = 1.0 if device.type == "cuda" and when == "first" else None
        name = f"start-up proof, shapes of {shape}, 1 to {max(512, tokens)} rows, {when}"
        yield row(name, proof.seconds, "s", 2.0, "s, the most that it may take", most=most, why=why)


def _host_seconds(learner: Learner, batch: Batch, device: torch.device) -> float:
    """Time until everything is on its way; the device has so little to do that it is never waited for long."""
    bench.wait(device)
    began = time.perf_counter()
    learner.forward_backward(batch)
    spent = time.perf_counter() - began
    bench.wait(device)
    learner.clear_gradients()
    return spent


def few_tokens(spec: ModelSpec) -> Batch:
    """Two sequences of 33 tokens."""
    rollouts = bench.requests(2, prompt=17, new=16, vocab=spec.vocab_size)
    return bench.batch_of([bench.rollout_of(request) for request in rollouts])


def bench_experts(device: torch.device, *, layers: int, batches: list[int], new: int) -> Iterator[Row]:
    """Decode of Qwen3-30B-A3B's shape in graphs over steps one by one, and whether the learner finds the same bits."""
    shape = "qwen3-30b-a3b" if device.type == "cuda" else "tiny-moe"
    for preset in ("bf16", "mxfp8", "nvfp4_experts"):
        spec, plan = plan_of(shape, preset, native=False, num_hidden_layers=layers)
        sampler = bench.engine(shape, preset, device, slots=max(batches), max_len=64 + new, layers=layers)
        rollouts = []
        for count in batches:
            wanted = bench.requests(count, prompt=64, new=new, vocab=spec.vocab_size)
            rates = []
            for graphs in (sampler.graphs, None):
                sampler.graphs, kept = graphs, sampler.graphs
                few = new if graphs is not None else min(8, new)
                run = [
                    dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=few)) for r in wanted
                ]
                took = seconds(partial(sampler.generate, run), device, repeats=1, warmups=1)
                rates.append(count * few / took)
                sampler.graphs = kept
            rollouts = sampler.generate(wanted)
            name = f"decode {shape} {preset}, {spec.num_layers} layers, {count} sequences, prompt 64, {new} new"
            yield row(name, rates[0], "tokens/s in graphs", rates[1], "steps one by one")
        del sampler
        learner = Learner(spec, plan, bench.random_tensors(spec, device), LearnerConfig(max_tokens=8192), device=device)
        batch = bench.batch_of(rollouts)
        found = torch.cat([r.logp_R for r in rollouts])
        logp = torch.cat(learner.log_probs(batch)).cpu()
        equal = (logp.view(torch.int32) == found.view(torch.int32)).double().mean().item()
        yield row(
            f"{shape} {preset}: share of {len(found)} log-probs with equal bytes", equal, "", 1.0, "all", least=1.0
        )
        took = seconds(partial(learner.forward_backward, batch), device, repeats=2, warmups=1)
        num = sum(len(s.tokens_T) - 1 for s in batch.sequences)
        yield row(f"learner {shape} {preset}, {num} tokens, {spec.num_layers} layers", took * 1e3, "ms", None, "")
        del learner
        if device.type == "cuda":
            torch.cuda.empty_cache()
