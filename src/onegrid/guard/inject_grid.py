"""Faults of C1 and C2: another format in the sampler, or the same format on another grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, dequantize, digest, quantize
from onegrid.guard.injection import (
    Bench,
    after_load,
    captured_anew,
    change_byte,
    exchange,
    last_expert,
    moved,
    put_back,
    wrap,
)
from onegrid.model.canonical import Canonical, parts_of
from onegrid.model.stacks import is_stack, stack_key
from onegrid.ops.operand import Operand, operand, operand_of

WORD = (1 << 64) - 1


def keys_like(*endings: str) -> Callable[[Bench], list[str]]:
    """Storage keys of all layers that end so."""
    return lambda bench: [key for key in bench.weights.keys if key.endswith(endings)]


def regrid(
    keys_of: Callable[[Bench], list[str]],
    make: Callable[[Tensor, str], Canonical],
    *,
    activation: str | None = "same",
) -> Callable[[Bench], None]:
    """A sampler that keeps some layers on a grid of its own, made of the learner's BF16 values.

    make        (values, planned quantizer name) -> what it holds
    activation  quantizer of its inputs; "same" leaves it
    Its kernels, its digest and its description are those of what it holds.
    """

    def inject(bench: Bench) -> None:
        weights = bench.weights
        held: dict[str, Canonical] = {}
        keys = keys_of(bench)
        planned = dict(weights.activation)

        def derived(original: Callable[[str], Operand | None], key: str) -> Operand | None:
            alien = held.get(key)
            if alien is None:
                return original(key)
            return operand(alien, None) if isinstance(alien, Tensor) else operand_of(alien)

        def canonical(original: Callable[[str], Canonical], name: str) -> Canonical:
            key = stack_key(name)
            return one_of(held[key], weights.keys[key].index(name)) if key in held and bench.armed else original(name)

        def digests(original: Callable[[Iterable[str]], dict[str, int]], names: Iterable[str]) -> dict[str, int]:
            out = original(names)
            for name in out:
                if stack_key(name) in held and bench.armed:
                    parts = parts_of(weights.canonical(name))
                    mine = sum(digest(x.contiguous(), role=part) for part, x in parts.items()) & WORD
                    if mine != out[name]:
                        bench.touch([name])
                    out[name] = mine
            return out

        def tensor(original: Callable[[str], Tensor], name: str) -> Tensor:
            if name not in held or weights.keeps_operands:
                return original(name)
            return weights.read(name).values

        def derive(original: Callable[..., None], *arguments: Any) -> None:
            was_alien = bool(held)
            held.clear()
            weights.activation.update(planned)
            for key in keys if bench.armed else ():
                values = bench.learner.masters[key].detach().to(torch.bfloat16)
                held[key] = make(values, str(bench.learner.plan[weights.keys[key][0]].sampler_weight))
                if activation != "same":
                    weights.activation[key] = None if activation is None else QUANTIZERS[activation]
            original(*arguments)
            if held or was_alien:
                captured_anew(bench)

        if weights.packed is not None:  # its kernels read the codes that were loaded
            wrap(weights.packed, "of", lambda original, of, rows: None if held.keys() & of else original(of, rows))
            wrap(weights.packed, "parts", lambda original, key: {} if key in held else original(key))
        wrap(weights, "_derived", derived)
        wrap(weights, "derive", derive)
        wrap(weights, "tensor", tensor)
        wrap(weights, "canonical", canonical)
        wrap(bench.intake, "canonical_digests", digests)
        wrap(bench.sampler, "stored", lambda original, name: _stored(bench, held, original, name))

    return inject


def _stored(bench: Bench, held: dict[str, Canonical], original: Callable[[str], Any], name: str) -> dict[str, Tensor]:
    key = stack_key(name)
    if key not in held or not bench.armed:
        return original(name)
    return {part: x.contiguous() for part, x in parts_of(bench.weights.canonical(name)).items()}


def one_of(held: Canonical, index: int) -> Canonical:
    """One tensor of a stack, or the tensor itself."""
    if isinstance(held, Tensor):
        return held[index] if held.dim() == 3 else held
    if held.codes.dim() < 3:
        return held
    amax = None if held.amax is None else held.amax[index]
    return dataclasses.replace(
        held, codes=held.codes[index], scales=held.scales[index], amax=amax, factor=None, shape=held.shape[1:]
    )


def plain(values: Tensor, planned: str) -> Canonical:
    """Left in BF16."""
    return values


def as_quantizer(name: str, *, disguised: bool = False) -> Callable[[Tensor, str], Canonical]:
    """Quantized by `name`; disguised, it calls itself what the plan asked for."""

    def make(values: Tensor, planned: str) -> Canonical:
        q = quantize(values, QUANTIZERS[name])
        return dataclasses.replace(q, quantizer=QUANTIZERS[planned]) if disguised else q

    return make


def own_amax(values: Tensor, planned: str) -> Canonical:
    """A global amax of its own where the plan shares one between gate and up."""
    return quantize(values, QUANTIZERS[planned])


def shard_amax(values: Tensor, planned: str) -> Canonical:
    """Codes of two shards along the output, each under its own amax, joined under the whole's."""
    quantizer = QUANTIZERS[planned]
    whole = quantize(values, quantizer)
    halves = [quantize(x.contiguous(), quantizer) for x in values.chunk(2, dim=-2)]
    codes, scales = (torch.cat([getattr(h, part) for h in halves], dim=-2) for part in ("codes", "scales"))
    return dataclasses.replace(whole, codes=codes, scales=scales)


def norm_rounded(bench: Bench) -> None:
    """The last norm's weight, rounded to the FP8 grid in the storage that is read: what it changes, logits show."""
    name = "model.norm.weight"

    def act() -> None:
        live = bench.weights.parts(name)["values"]
        rounded = dequantize(quantize(live[None], QUANTIZERS["fp8_tensor"]), torch.bfloat16)[0]
        if not torch.equal(live, rounded):
            live.copy_(rounded)
            bench.touch([name])

    after_load(bench, act)


def one_byte_of_one_expert(bench: Bench) -> None:
    """One bit of one code."""
    after_load(bench, lambda: change_byte(bench, last_expert(moved(bench)), "codes", lambda b: b ^ 1))


def scale_off_by_one(bench: Bench) -> None:
    """One scale byte, one larger."""
    name_of = lambda: last_expert([n for n in bench.weights.names() if "scales" in bench.weights.parts(n)])  # noqa: E731
    after_load(bench, lambda: change_byte(bench, name_of(), "scales", lambda b: b + 1))


def nan_code(bench: Bench) -> None:
    """The code of NaN where a number was."""
    after_load(bench, lambda: change_byte(bench, last_expert(moved(bench)), "codes", lambda b: 0x7F))


def stale_scales(bench: Bench) -> None:
    """New codes under old scales, wherever both have moved."""

    def act() -> None:
        names = [n for n in moved(bench, "scales") if n in set(moved(bench, "codes"))]
        if names:
            put_back(bench, names, ["scales"])

    after_load(bench, act)


def permuted_rows(bench: Bench) -> None:
    """Rows of one tensor in another order; shape, dtype and every byte are kept."""

    def act() -> None:
        name = last_expert(moved(bench))
        for live in bench.weights.parts(name).values():
            if live.dim() == 2:
                live.copy_(live.clone().roll(1, dims=0))
        bench.touch([name])

    after_load(bench, act)


def gate_and_up_swapped(bench: Bench) -> None:
    """Gate where up should be, in every expert of the last layer."""

    def act() -> None:
        gates = [n for n in bench.weights.names() if n.endswith("gate_proj.weight") and is_stack(stack_key(n))]
        layer = gates[-1].split(".experts.")[0]
        for gate in (n for n in gates if n.startswith(layer)):
            up = gate.replace("gate_proj", "up_proj")
            for part, live in bench.weights.parts(gate).items():
                exchange(live, bench.weights.parts(up)[part])
            bench.touch([gate, up])

    after_load(bench, act)


def activation_grid(quantizer: str | None) -> Callable[[Bench], None]:
    """The sampler quantizes the inputs of q, k and v of the first layer in another way."""

    def inject(bench: Bench) -> None:
        keys = [key for key in bench.weights.keys if "layers.0." in key and key.endswith(("q_proj.weight",))]
        planned = dict(bench.weights.activation)

        def set_grid(armed: bool) -> None:
            for key in keys:
                mine = None if quantizer is None else QUANTIZERS[quantizer]
                bench.weights.activation[key] = mine if armed else planned[key]
            if armed:
                bench.touch([name for key in keys for name in bench.weights.keys[key]])

        def derive(original: Callable[..., None], *arguments: Any) -> None:
            original(*arguments)
            set_grid(bench.armed)
            if bench.touched:
                captured_anew(bench)

        wrap(bench.weights, "derive", derive)

    return inject
