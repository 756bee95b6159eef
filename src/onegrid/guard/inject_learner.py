"""Faults on the learner's side: what it computes with, publishes and differentiates is not one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onegrid.guard.inject_state import copies, tensors
from onegrid.guard.injection import Bench, needs_operands, wrap
from onegrid.model.canonical import parts_of, raw_bytes
from onegrid.model.stacks import is_stack
from onegrid.ops.operand import Operand


def forward_reads_other_codes(bench: Bench) -> None:
    """One code of the operand that the learner's forward reads is not the published one."""

    def derive(original: Callable[..., None], *arguments: Any) -> None:
        original(*arguments)
        if bench.armed:
            key = [k for k in bench.learner.keys if k.endswith("o_proj.weight")][-1]
            values = bench.learner.live.operands[key].values
            values[0, 0] = values[0, 0] * 1.25 + 1.0
            bench.touch(bench.learner.keys[key])

    wrap(bench.learner.live, "derive", derive)


def update_not_quantized(bench: Bench) -> None:
    """The learner counts its version up and publishes the codes of the one before, for one class of layers."""

    def write(original: Callable[..., None], key: str, value: Any) -> None:
        if bench.armed and key.endswith("q_proj.weight"):
            held = parts_of(bench.learner.live.held[key])
            if any(bool((raw_bytes(x) != raw_bytes(held[p])).any()) for p, x in parts_of(value).items()):
                bench.touch(bench.learner.keys[key])
            return None
        return original(key, value)

    wrap(bench.learner.live, "write", write)


def forward_copy(bench: Bench) -> None:
    """A linear of the learner reads a copy of its operand, made at one version and not updated after."""

    def step(original: Callable[[], Any]) -> Any:
        key = [k for k in bench.learner.keys if k.endswith("v_proj.weight")][-1]
        site = bench.learner.grad_weights.sites[key]
        if bench.learner.version + 1 >= bench.at and site.rowwise is bench.learner.live.operands[key]:
            values, *rest = copies(site.rowwise)
            row = rest[0] if site.rowwise.row is not None else None
            site.rowwise = Operand(values, site.rowwise.kind, row, rest[-1] if site.rowwise.block is not None else None)
            assert len(tensors(site.rowwise)) == 1 + len(rest)
            bench.touch(bench.learner.keys[key])
        return original()

    wrap(bench.learner, "step", step)


def nan_in_master(bench: Bench) -> None:
    """One weight of the learner becomes NaN."""

    def values(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        out = original()
        if bench.armed:
            key = list(out)[-2]
            bench.learner.masters[key].detach().view(-1)[0] = float("nan")
            bench.touch([bench.learner.keys[key][0]])
            out = original()
        return out

    wrap(bench.learner, "_values", values)


def backward_ignored(bench: Bench) -> None:
    """One linear runs another backward than the plan says, and does not say so."""

    def step(original: Callable[[], Any]) -> Any:
        metrics = original()
        if bench.armed:
            key = [k for k in bench.learner.keys if k.endswith("down_proj.weight")][-1]
            site = bench.learner.grad_weights.sites[key]
            site.backward = "high_precision" if site.backward != "high_precision" else "dequantized"
            site.calls.clear()
            bench.touch(bench.learner.keys[key])
        return metrics

    wrap(bench.learner, "step", step)


def adapters_not_merged(bench: Bench) -> None:
    """The optimizer moves the adapters, and the masters stay what they were."""
    adapters = bench.learner.adapters
    assert adapters is not None

    def merge(original: Callable[[], None]) -> None:
        if not bench.armed:
            return original()
        for key in adapters.names:
            have, want = bench.learner.masters[key].detach(), adapters.merged(key)
            names = bench.learner.keys[key]
            pairs = zip(have, want, strict=True) if is_stack(key) else [(have, want)]
            bench.touch([n for n, (x, y) in zip(names, pairs, strict=True) if not torch.equal(x, y)])
        return None

    wrap(adapters, "merge", merge)


def both_sides_forget(bench: Bench) -> None:
    """Neither side derives the operand of one linear again, so both hold the same one, of the version before."""
    needs_operands(bench)
    key = [key for key in bench.learner.keys if key.endswith("o_proj.weight")][-1]

    def derive(original: Callable[..., None], keys: Any = None) -> None:
        if not bench.armed:
            return original(keys)
        bench.touch(bench.learner.keys[key])
        return original([k for k in (bench.learner.keys if keys is None else keys) if k != key])

    wrap(bench.learner.live, "derive", derive)
    wrap(bench.weights, "derive", derive)
