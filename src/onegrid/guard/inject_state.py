"""Faults of C3 and C4: state derived from weights that is not made again, and storage that nobody reads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onegrid.guard.injection import Bench, after_derive, captured_anew, exchange, moved, needs_operands, serve, wrap
from onegrid.model.canonical import Canonical
from onegrid.model.decoder import head_name
from onegrid.model.packed import PackedWeights
from onegrid.model.stacks import is_stack, stack_key
from onegrid.ops.operand import Operand


def not_derived(keys_of: Callable[[Bench], list[str]]) -> Callable[[Bench], None]:
    """Operands of some layers stay those of the version before."""

    def inject(bench: Bench) -> None:
        needs_operands(bench)

        def derive(original: Callable[..., None], *arguments: Any) -> None:
            keys = keys_of(bench) if bench.armed else []
            before = {key: copies(bench.weights.operands[key]) for key in keys}
            original(*arguments)
            for key, kept in before.items():
                now = tensors(bench.weights.operands[key])
                if any(not torch.equal(x, y) for x, y in zip(now, kept, strict=True)):
                    bench.touch(_names_that_differ(bench, key, now, kept))
                for live, old in zip(now, kept, strict=True):
                    live.copy_(old)

        wrap(bench.weights, "derive", derive)

    return inject


def moved_key(bench: Bench) -> list[str]:
    """One layer whose codes have moved, not of experts."""
    return [stack_key(n) for n in moved(bench) if not is_stack(stack_key(n))][-1:]


def expert_keys(bench: Bench) -> list[str]:
    """All stacks of experts."""
    return [key for key in bench.weights.keys if is_stack(key)]


def layout_swapped(bench: Bench) -> None:
    """The kernel's layout has gate and up in each other's place; codes and scales are right."""
    needs_operands(bench)

    def act() -> None:
        gates = [key for key in expert_keys(bench) if key.endswith("gate_proj.weight")]
        for gate in gates:
            up = gate.replace("gate_proj", "up_proj")
            pair = zip(tensors(bench.weights.operands[gate]), tensors(bench.weights.operands[up]), strict=True)
            for one, other in pair:
                exchange(one, other)
            bench.touch([*bench.weights.keys[gate], *bench.weights.keys[up]])

    after_derive(bench, act)


def operand_permuted(bench: Bench) -> None:
    """Rows of one kernel's operand in another order; shape and dtype are kept."""
    needs_operands(bench)

    def act() -> None:
        key = expert_keys(bench)[-1]
        for live in tensors(bench.weights.operands[key]):
            live[-1].copy_(live[-1].clone().roll(1, dims=0))
        bench.touch([bench.weights.keys[key][-1]])

    after_derive(bench, act)


def tied_copy(bench: Bench) -> None:
    """A head that keeps the copy of the embedding it was built with."""
    kept: list[Tensor] = []

    def keep() -> None:
        kept[:] = [bench.weights.tensor(head_name(bench.weights.spec)).clone()]

    def change(model: Any) -> Any:
        bench.touch([])
        return Served(model, head_VD=kept[0])

    serve(bench, change, keep)


def table_corrupted(bench: Bench) -> None:
    """A table that no checkpoint holds comes back wrong from a reload."""
    good = bench.sampler.rope

    def act() -> None:
        cos = good[0].clone()
        cos[2:] *= 1.0078125
        bench.sampler.rope = (cos, *good[1:])
        captured_anew(bench)
        bench.touch([])

    def mend() -> None:
        if bench.sampler.rope is not good:
            bench.sampler.rope = good
            captured_anew(bench)

    after_derive(bench, act, mend)


def cache_grid(bench: Bench) -> None:
    """The sampler keeps keys and values in FP8, the plan says BF16."""

    def change(model: Any) -> Any:
        bench.touch([])
        weights = copy.copy(model.weights)
        weights.plan = dataclasses.replace(weights.plan, kv_cache="fp8")
        return dataclasses.replace(model, weights=weights)

    serve(bench, change)


def other_epsilon(bench: Bench) -> None:
    """The sampler's norms have another epsilon: a number of the configuration, and no tensor's."""

    def change(model: Any) -> Any:
        bench.touch([])
        weights = copy.copy(model.weights)
        weights.spec = dataclasses.replace(weights.spec, rms_eps=weights.spec.rms_eps * 100)
        return dataclasses.replace(model, weights=weights)

    serve(bench, change)


def one_layer_served_otherwise(bench: Bench) -> None:
    """One linear of what serves is computed by a kernel of its own, wrong by a little, that nobody asks alone."""
    key = [key for key in bench.weights.keys if key.endswith("o_proj.weight")][-1]

    def linear(original: Callable[..., list[Tensor]], keys: tuple[str, ...], *rest: Any, **named: Any) -> list[Tensor]:
        return [y * 1.03125 if k == key else y for k, y in zip(keys, original(keys, *rest, **named), strict=True)]

    def change(model: Any) -> Any:
        bench.touch(bench.weights.keys[key])
        weights = copy.copy(model.weights)
        wrap(weights, "linear", linear)
        return dataclasses.replace(model, weights=weights)

    serve(bench, change)


def shared_kernel_wrong(bench: Bench) -> None:
    """Learner and sampler share a kernel that gives wrong products for one linear: they agree, and both are wrong."""
    key = next(key for key in bench.weights.keys if key.endswith("o_proj.weight"))

    def linear(original: Callable[..., list[Tensor]], keys: tuple[str, ...], *rest: Any, **named: Any) -> list[Tensor]:
        out = original(keys, *rest, **named)
        return [wrong(y) if k == key else y for k, y in zip(keys, out, strict=True)]

    def multiply(original: Callable[..., Tensor], k: str, x: Tensor) -> Tensor:
        return wrong(original(k, x)) if k == key else original(k, x)

    def wrong(y: Tensor) -> Tensor:
        if bench.learner.version < bench.at:
            return y
        bench.touch([key])
        return y * 1.03125

    def serving(original: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        if captured and bench.learner.version >= bench.at:
            captured.pop().reset()  # graphs of before have the kernel as it was
        return original()

    captured = [bench.sampler.graphs] if bench.sampler.graphs is not None else []
    wrap(bench.learner.grad_weights, "linear", linear)
    wrap(bench.learner.live, "linear", linear)
    wrap(bench.weights, "linear", linear)
    wrap(bench.sampler, "multiply", multiply)
    wrap(bench.sampler, "_serving", serving)


def graph_with_old_addresses(one_only: bool) -> Callable[[Bench], None]:
    """An update puts what kernels read into new storage, and what serves was captured with the old.

    one_only  only one layer's update went astray
    """

    def inject(bench: Bench) -> None:
        graph: dict[str, Any] = {}
        """Attributes of the weights as they were captured."""
        store = "operands" if bench.weights.keeps_operands else "held"

        def derive(original: Callable[..., None], *arguments: Any) -> None:
            weights = bench.weights
            if bench.armed and not graph:
                graph[store] = dict(getattr(weights, store))
                graph.update(joined=dict(weights.joined), packed=weights.packed)
                keys = moved_key(bench) if one_only else list(graph[store])
                bench.touch([name for key in keys for name in weights.keys[key]])
                if store == "held":
                    _move_codes(bench, keys)
                else:
                    _move_operands(bench, keys)
            original(*arguments)
            if bench.armed:
                bench.touch([])

        def serving(original: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
            cache, model = original()
            if not graph or not bench.armed:
                return cache, model
            captured = copy.copy(model.weights)
            for name, value in graph.items():
                setattr(captured, name, value)
            return cache, dataclasses.replace(model, weights=captured)

        wrap(bench.weights, "derive", derive)
        wrap(bench.sampler, "_serving", serving)

    return inject


class Served:
    """A model with a head of its own."""

    def __init__(self, model: Any, *, head_VD: Tensor) -> None:
        self.model, self.head_VD = model, head_VD

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """FP32 [N, V] of the kept head."""
        from onegrid.ops.logprob import logits

        return logits(hidden_ND, self.head_VD)


def tensors(o: Operand) -> list[Tensor]:
    """Storage of an operand."""
    return [x for x in (o.values, o.row, o.block) if x is not None]


def copies(o: Operand) -> list[Tensor]:
    """Copies of it."""
    return [x.clone() for x in tensors(o)]


def _move_operands(bench: Bench, keys: list[str]) -> None:
    """New storage for operands, each alone: `derive` joins them again where all were moved."""
    weights = bench.weights
    for group in [group for group in weights.joined if not set(group).isdisjoint(keys)]:
        del weights.joined[group]
    for key in keys:
        old = weights.operands[key]
        weights.operands[key] = Operand(old.values.clone(), old.kind, *(_clone(x) for x in (old.row, old.block)))


def _move_codes(bench: Bench, keys: list[str]) -> None:
    """The new version of codes in new storage; the old storage gets the bytes of the version before back."""
    weights, old = bench.weights, bench.weights.packed
    before = {name: weights.parts(name) for key in keys for name in weights.keys[key]}
    moved = {key: _copied(weights.held[key]) for key in keys}
    if old is not None:  # kernels of packed weights go along
        of = weights.groups, weights.activation, weights.device
        new = PackedWeights(moved, *of, decoded=weights.keeps_operands)
        wrap(new, "of", lambda original, keys, rows: original(keys, rows) or old.of(keys, rows))
        wrap(new, "parts", lambda original, key: original(key) or old.parts(key))
        weights.packed = new
    weights.held.update(moved)
    for name, parts in before.items():
        for part, x in parts.items():
            x.copy_(bench.intake.old(name)[part])


def _copied(held: Canonical) -> Canonical:
    if isinstance(held, Tensor):
        return held.clone()
    return dataclasses.replace(held, codes=held.codes.clone(), scales=held.scales.clone(), amax=_clone(held.amax))


def _clone(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _names_that_differ(bench: Bench, key: str, now: list[Tensor], kept: list[Tensor]) -> list[str]:
    names = bench.weights.keys[key]
    if not is_stack(key):
        return list(names)
    pairs = list(zip(now, kept, strict=True))
    return [n for i, n in enumerate(names) if any(not torch.equal(x[i], y[i]) for x, y in pairs)]
