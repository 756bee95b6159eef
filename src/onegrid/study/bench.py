"""Speed, measured: operations, decoding, a learner's step, a synchronization. Ratios of two things in one run.

Nothing here asserts. Every row says what stands on both sides of its ratio, and where a number comes from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, quantize
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.model.publish import publish
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack
from onegrid.ops.capture import capturing
from onegrid.ops.codes_cuda import new_counts, quantized
from onegrid.ops.operand import operand, operand_of
from onegrid.ops.packed_attention import segments_of
from onegrid.ops.table import kernels_for
from onegrid.recipe import PRESETS, resolve
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync.transaction import push
from onegrid.types import Batch, Request, Rollout, Sampling, Sequence

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SHAPES = {
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
SHAPES["tiny-moe"] = SHAPES["tiny"] | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
"""Models by shape; their weights are random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured ratio."""

    name: str
    ours: float
    unit: str
    other: float | None
    what: str
    """What `other` is."""
    ratio: float | None
    target: str = ""
    met: bool | None = None
    why: str = ""
    weight_bytes: int | None = None
    """Of a sampler: codes, scales, BF16 tensors and operands that it holds."""
    peak_bytes: int | None = None
    """Most memory of the device at once during the call; None where it is not known."""


def row(
    name: str, ours: float, unit: str, other: float | None, what: str, *, least: float | None = None,
    most: float | None = None, why: str = "",
) -> Row:  # fmt: skip
    """A row whose ratio is ours over other, with a target for the ratio from one side."""
    ratio = None if other is None else ours / other
    target = f">= {least}" if least is not None else f"<= {most}" if most is not None else ""
    met = None
    if ratio is not None and target:
        met = ratio >= least if least is not None else ratio <= (most or 0.0)
    return Row(
        name=name, ours=ours, unit=unit, other=other, what=what, ratio=ratio, target=target, met=met, why=why
    )  # fmt: skip


def seconds(function: Callable[[], object], device: torch.device, *, repeats: int = 10, warmups: int = 2) -> float:
    """Median seconds of a call, the device's work included."""
    times = []
    for index in range(warmups + repeats):
        wait(device)
        began = time.perf_counter()
        function()
        wait(device)
        if index >= warmups:
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def spec_and_plan(shape: str, preset: str, layers: int | None):
    """Spec, plan and config of one of SHAPES, perhaps with fewer layers."""
    config = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    spec = ModelSpec.from_hf_config(config)
    return spec, resolve(PRESETS[preset], config, tensor_shapes(spec))


def random_tensors(spec: ModelSpec, device: torch.device) -> dict[str, Tensor]:
    """BF16 weights by canonical name: normal, .02; norms around 1."""
    generator = torch.Generator(device=device).manual_seed(0)
    out = {}
    for name, shape in tensor_shapes(spec).items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        out[name] = noise * 0.02 if len(shape) > 1 else 1 + 0.1 * noise
    return out


def engine(
    shape: str,
    preset: str,
    device: torch.device,
    *,
    slots: int,
    max_len: int,
    layers: int | None = None,
    weights: str = "auto",
) -> Engine:
    """An engine with random weights, version 0."""
    spec, plan = spec_and_plan(shape, preset, layers)
    live = LiveWeights(spec, plan, side="sampler", device=device, weights=weights)
    tensors = random_tensors(spec, device)
    values = {}
    for key, names in live.keys.items():
        parts = [tensors.pop(name) for name in names]
        values[key] = torch.stack(parts) if is_stack(key) else parts[0]
    for key, value in publish(values, live.keys, plan, side="sampler").items():
        live.write(key, value)
    del values
    live.derive()
    config = SamplerConfig(max_slots=slots, max_len=max_len, prefill_tokens=16_384, weights=weights)
    return Engine(live, config, version=0)


def requests(count: int, *, prompt: int, new: int, vocab: int) -> list[Request]:
    """Prompts that share nothing; temperature 1."""
    sampling = Sampling(max_new_tokens=new)
    tokens = [tuple((i * 7919 + j * 104_729) % vocab for j in range(prompt)) for i in range(count)]
    return [Request(prompt_index=i, sample=0, prompt_tokens=t, seed=1, sampling=sampling) for i, t in enumerate(tokens)]


def bench_ops(device: torch.device) -> Iterator[Row]:
    """Quantization against a copy; decode attention against the library's."""
    on_gpu = device.type == "cuda"
    wide, least = ((8192, 4096), 0.85) if on_gpu else ((512, 1024), None)
    x = torch.randn(wide, device=device).to(torch.bfloat16)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / graph_seconds(partial(y.copy_, x), device)
    for name in ("mxfp8", "mxfp4", "nvfp4_row", "fp8_1x128"):
        took = graph_seconds(partial(operand, x, QUANTIZERS[name]), device)
        moved = x.nbytes + x.numel() * (2 if on_gpu else 4)
        yield row(f"quantize-decode {name} {wide}", moved / took / 1e12, "TB/s", copy / 1e12, "copy", least=least)
    for name in ("mxfp8", "mxfp4", "nvfp4", "fp8_128x128"):
        make = partial(quantized, x, QUANTIZERS[name], counts=new_counts(1, device)[0])  # as of one version of a model
        took, moved = graph_seconds(make, device), x.nbytes + quantize(x, QUANTIZERS[name]).num_bytes
        why = f"a call alone, its launches and a wait included, {seconds(make, device) * 1e6:.0f} us" if on_gpu else ""
        why += "; numbers are read twice, first for the tensor's amax" if on_gpu and name == "nvfp4" else ""
        title = f"quantize to codes {name} {wide}"
        yield row(title, moved / took / 1e12, "TB/s", copy / 1e12, "copy", least=least, why=why)
    for name in ("mxfp8", "nvfp4", "fp8_128x128"):
        q = quantize(x, QUANTIZERS[name])
        took = graph_seconds(partial(operand_of, q), device)
        moved = q.num_bytes + x.numel() * (2 if on_gpu else 4)
        yield row(f"decode {name} {wide}", moved / took / 1e12, "TB/s", copy / 1e12, "copy")
    if on_gpu:
        yield from _packed(device)
        yield from _attention(device, copy)


def _packed(device: torch.device) -> Iterator[Row]:
    """Matmuls of 32 rows behind their quantizer, the linears of the 8B shape: our kernel against the library's."""
    from onegrid.ops.matmul_choice import choose

    for weight, activation in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_row")):
        for shape in ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)):
            for choice in choose(shape, weight, activation, device):
                if choice.rows == 32:
                    name = f"quantizer and matmul of 32 rows, {weight} weights {shape}"
                    why = "the same bytes" if choice.same_bytes else "other bytes, so never taken"
                    yield row(name, choice.own_us, "us", choice.library_us, "the library, decoded", why=why)


def _attention(device: torch.device, copy: float) -> Iterator[Row]:
    kernels = kernels_for(device, num_heads=32, num_groups=8, head_dim=128)
    stock = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    assert kernels.slots is not None
    for count, length in ((32, 512), (256, 512), (256, 2048), (8, 8192), (1, 32_768)):
        q, k, v = (torch.randn(count, n, 128, device=device).to(torch.bfloat16) for n in (32, 8, 8))
        keys, values = (torch.randn(count, 8, length, 128, device=device).to(torch.bfloat16) for _ in range(2))
        position = torch.full((count,), length - 1, device=device)
        ours = graph_seconds(partial(kernels.slots, q, k, v, keys, values, position), device)
        other = graph_seconds(partial(stock, q.unsqueeze(2), keys, values), device)
        why = f"ours also writes the new key and value; byte floor {keys.nbytes * 2 / copy * 1e6:.0f} us"
        name = f"decode attention {count} x {length} keys"
        yield row(name, ours * 1e6, "us", other * 1e6, "stock split-key", why=why)
    q, k, v = (torch.randn(8192, n, 128, device=device).to(torch.bfloat16) for n in (32, 8, 8))
    segments = segments_of([i * 1024 for i in range(8)], [1024] * 8, 8192, device)
    ours = seconds(partial(kernels.packed_attention, q, k, v, segments), device)
    parts = [t.view(8, 1024, -1, 128).transpose(1, 2) for t in (q, k, v)]
    other = seconds(partial(stock, *parts, is_causal=True), device)
    yield row("prefill attention 8 x 1024", ours * 1e3, "ms", other * 1e3, "stock flash")


def graph_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call without launch costs: a graph of eight calls on a GPU, the call itself elsewhere."""
    if device.type != "cuda":
        return seconds(function, device, repeats=5)
    for _ in range(2):
        function()
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(8):
            function()
    took = seconds(graph.replay, device) / 8
    graph.reset()
    return took


def bench_learner(
    shape: str, presets: list[str], device: torch.device, *, tokens: int, layers: int | None
) -> Iterator[Row]:
    """Forward and backward over `tokens` tokens; and whether its log-probs are the sampler's bytes."""
    baseline: float | None = None
    for preset in presets:
        spec, plan = spec_and_plan(shape, preset, layers)
        learner = Learner(spec, plan, random_tensors(spec, device), LearnerConfig(max_tokens=tokens), device=device)
        length = min(512, tokens)
        sampler = engine(shape, preset, device, slots=tokens // length, max_len=length, layers=layers)
        prompt = length // 4
        rollouts = sampler.generate(
            requests(tokens // length, prompt=prompt, new=length - prompt, vocab=spec.vocab_size)
        )
        batch = batch_of(rollouts)
        logp = learner.log_probs(batch)
        found = torch.cat([r.logp_R for r in rollouts])
        equal = (torch.cat(logp).cpu().view(torch.int32) == found.view(torch.int32)).double().mean().item()
        num = found.numel()
        yield row(f"{shape} {preset}: share of {num} log-probs with equal bytes", equal, "", 1.0, "all", least=1.0)
        del sampler
        took = seconds(partial(learner.forward_backward, batch), device, repeats=3, warmups=1)
        if preset == "bf16":
            baseline = took
        most = {"mxfp8": 1.1}.get(preset) if device.type == "cuda" else None
        name = f"learner {shape} {preset}, {tokens} tokens, {spec.num_layers} layers"
        yield row(name, took * 1e3, "ms", None if baseline is None else baseline * 1e3, "ours in bf16", most=most)
        del learner
        if device.type == "cuda":
            torch.cuda.empty_cache()


def bench_sync(shape: str, presets: list[str], device: torch.device, *, layers: int | None) -> Iterator[Row]:
    """From masters to a version that serves, on one device: making the snapshot (rounding masters, quantizing, digests
    of codes, the learner's operands), then transfer, commit and proof of every tensor; each in a row, and together."""
    baseline: float | None = None
    first: float | None = None
    for preset in presets:
        spec, plan = spec_and_plan(shape, preset, layers)
        learner = Learner(spec, plan, random_tensors(spec, device), LearnerConfig(), device=device)
        sampler = engine(shape, preset, device, slots=16, max_len=64, layers=layers)
        made = seconds(learner._quantize, device, repeats=9)
        took = seconds(partial(_sync, learner, sampler), device, repeats=9)
        if preset == "bf16":
            baseline, first = took, made
        name = f"making a version {shape} {preset}, {spec.num_layers} layers"
        yield row(name, made * 1e3, "ms", None if first is None else first * 1e3, "ours in bf16")
        name = f"sync {shape} {preset}, {spec.num_layers} layers"
        yield row(name, took * 1e3, "ms", None if baseline is None else baseline * 1e3, "ours in bf16")
        most = {"mxfp8": 1.2}.get(preset) if device.type == "cuda" else None
        name = f"snapshot, transfer and commit {shape} {preset}, {spec.num_layers} layers"
        both = None if baseline is None or first is None else (first + baseline) * 1e3
        yield row(name, (made + took) * 1e3, "ms", both, "ours in bf16", most=most)
        del learner, sampler
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _sync(learner: Learner, sampler: Engine) -> None:
    learner.version += 1
    tensors = learner.canonical()
    push(Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=tensors), sampler)


def rollout_of(request: Request) -> Rollout:
    """Made-up tokens for a request, as many as it asks for."""
    count = request.sampling.max_new_tokens
    return Rollout(
        request=request,
        tokens_R=torch.arange(count) % 7,
        logp_R=torch.full((count,), -3.0),
        version_R=torch.zeros(count, dtype=torch.int64),
        finish="length",
        text="",
    )


def batch_of(rollouts: list[Rollout]) -> Batch:
    """Every rollout as a training sequence, advantages alternating."""
    sequences = []
    for index, r in enumerate(rollouts):
        count = len(r.tokens_R)
        sequences.append(
            Sequence(
                tokens_T=torch.cat([torch.tensor(r.request.prompt_tokens), r.tokens_R]),
                num_prompt=len(r.request.prompt_tokens),
                sampler_logp_R=r.logp_R,
                version_R=r.version_R,
                advantage_R=torch.full((count,), 1.0 if index % 2 else -1.0),
                mask_R=torch.ones(count, dtype=torch.bool),
                group_id=index,
            )
        )
    return Batch(sequences=tuple(sequences))


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
