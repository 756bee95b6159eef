"""From BF16 weights to the codes and scales of a version, by the plan: once per version, for learner and sampler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError
from onegrid.formats import QUANTIZERS, QuantTensor, count_true, quantize
from onegrid.model.stacks import is_stack
from onegrid.ops.codes_cuda import amax_of, new_counts, quantized
from onegrid.recipe import Plan


def publish(
    values: Mapping[str, Tensor],
    keys: Mapping[str, tuple[str, ...]],
    plan: Plan,
    *,
    side: str,
    by_definition: bool = False,
) -> dict[str, QuantTensor | Tensor]:
    """Codes and scales (or BF16 values) of every storage key.

    values  BF16 by storage key, stacked experts [E, out, in]
    keys    storage key -> canonical names, of `model.stacks`
    side    "learner" or "sampler": whose quantizer of the plan
    by_definition  quantize by the definition, whatever kernel there is
    Tensors of one amax group get one global amax, expert by expert. Raises NonFiniteError naming tensor and count.
    """
    if not values:
        return {}
    names = {key: _quantizer_name(plan, keys[key][0], side) for key in values}
    amax = _shared_amax({k: v for k, v in values.items() if names[k] is not None}, keys, plan, names)
    out: dict[str, QuantTensor | Tensor] = {}
    bad: list[Tensor] = []
    counts = new_counts(len(values), next(iter(values.values())).device)
    for row, (key, value) in zip(counts, values.items(), strict=True):
        name = names[key]
        if name is None:
            out[key] = value
            bad.append(count_true(~torch.isfinite(value)))
            continue
        make = quantize if by_definition else partial(quantized, counts=row)
        out[key] = q = make(value, QUANTIZERS[name], amax=amax.get(key))
        bad.append(q.stats.nonfinite)
    for key, count in zip(values, torch.stack(bad).tolist(), strict=True):  # one wait for all
        if count:
            first = _first_bad(key, keys[key], torch.isfinite(values[key]))
            raise NonFiniteError(f"{first}: {count} NaN or Inf values in {key}")
    return out


def _quantizer_name(plan: Plan, tensor: str, side: str) -> str | None:
    planned = plan[tensor]
    return planned.sampler_weight if side == "sampler" else planned.weight


def _shared_amax(
    values: Mapping[str, Tensor], keys: Mapping[str, tuple[str, ...]], plan: Plan, names: Mapping[str, str | None]
) -> dict[str, Tensor]:
    """Global amax by key, FP32 of shape () or (E,), where a group of several keys shares it."""
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for key in values:
        quantizer = QUANTIZERS[names[key] or ""]
        if quantizer.span == "tensor":
            groups.setdefault(tuple(plan[name].amax_group for name in keys[key]), []).append(key)
    shared: dict[str, Tensor] = {}
    for group, members in groups.items():
        if None in group or len(members) < 2:
            continue
        each = [amax_of(values[key]) for key in members]
        largest = torch.stack(each).amax(0)
        shared |= {key: largest for key in members}
    return shared


def _first_bad(key: str, names: tuple[str, ...], finite: Tensor) -> str:
    if not is_stack(key):
        return names[0]
    bad = (~finite).flatten(1).any(1).nonzero()[0, 0]
    return names[int(bad)]
