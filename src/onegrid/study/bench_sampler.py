"""Tokens per second of the embedded engine and the memory it takes, by recipe and by what its matmuls read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from onegrid.sampler.engine import Engine
from onegrid.study.bench import Row, engine, requests, row, seconds
from onegrid.types import Request, Rollout

ELSEWHERE = {("qwen3-8b", 32): 4871.0, ("qwen3-8b", 256): 16_607.0, ("qwen3-0.6b", 256): 29_152.0}
"""Tokens per second of vLLM 0.24.0 in BF16 on an H200, measured before, not in this run: prompt 128, 256 new."""

TARGETS = {("mxfp8", 32): 1.4, ("mxfp8", 256): 1.0, ("nvfp4_all", 32): 1.8}
"""Least ratio to our own BF16 on a GPU, at the 8B shape, by preset and sequences."""


def bench_sampler(
    shape: str,
    presets: list[str],
    batches: list[int],
    device: torch.device,
    *,
    prompt: int,
    new: int,
    layers: int | None = None,
    weights: tuple[str, ...] = ("auto",),
) -> Iterator[Row]:
    """Tokens per second of whole calls, prefill included, after one call of the same size; exact log-probabilities.

    weights  of `SamplerConfig`, one engine each; those after the first are compared with the first, bytes included
    """
    made_of = partial(engine, shape, device=device, slots=max(batches), max_len=prompt + new, layers=layers)
    whole = layers is None and (prompt, new) == (128, 256) and device.type == "cuda"
    targets = TARGETS if shape == "qwen3-8b" and device.type == "cuda" else {}
    baseline: dict[int, float] = {}
    for preset in presets:
        first: dict[int, tuple[float, list[Rollout]]] = {}
        for arm in weights:
            sampler = made_of(preset, weights=arm)
            held = sum(sampler.weights.num_bytes().values())
            vocab = sampler.weights.spec.vocab_size
            for count in batches:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                sampler.generate(requests(count, prompt=prompt, new=min(4, new), vocab=vocab))
                call = _Call(sampler, requests(count, prompt=prompt, new=new, vocab=vocab))
                rate = count * new / seconds(call, device, repeats=1, warmups=0)
                name = f"decode {shape} {preset}, {count} sequences, prompt {prompt}, {new} new"
                name += "" if weights == ("auto",) else f", weights {arm}"
                if count in first:
                    before, rollouts = first[count]
                    why = "the same bytes" if same(call.rollouts, rollouts) else "OTHER BYTES"
                    made = row(name, rate, "tokens/s", before, f"weights {weights[0]}, same run", why=why)
                elif preset == "bf16":
                    baseline[count] = rate
                    other = ELSEWHERE.get((shape, count)) if whole else None
                    what = "vLLM 0.24.0 BF16, measured before on an H200, not in this run" if other else ""
                    made = row(name, rate, "tokens/s", other, what, least=None if other is None else 1.2)
                else:
                    what, least = "ours in bf16, same run", targets.get((preset, count))
                    made = row(name, rate, "tokens/s", baseline.get(count), what, least=least)
                first.setdefault(count, (rate, call.rollouts))
                peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
                yield replace(made, weight_bytes=held, peak_bytes=peak)
            del sampler, call  # the call holds the engine
            if device.type == "cuda":
                torch.cuda.empty_cache()


class _Call:
    """One call of an engine, which keeps what it gave."""

    def __init__(self, sampler: Engine, wanted: list[Request]) -> None:
        self.sampler, self.wanted = sampler, wanted
        self.rollouts: list[Rollout] = []

    def __call__(self) -> None:
        self.rollouts = self.sampler.generate(self.wanted)


def same(one: list[Rollout], other: list[Rollout]) -> bool:
    """Whether tokens and log-probabilities have the same bytes."""
    return all(
        torch.equal(x.tokens_R, y.tokens_R) and torch.equal(x.logp_R.view(torch.int32), y.logp_R.view(torch.int32))
        for x, y in zip(one, other, strict=True)
    )
