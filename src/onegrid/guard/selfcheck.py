"""Self-check (C3, C6): what live kernels make of fixed inputs, against a reference product of the published weights.

The reference decodes the learner's codes and the activations of the plan's grid and multiplies in FP64. Linears take
turns by version, so that with n of them and m a synchronization each one, with all its experts, is reached within
ceil(n / m) synchronizations.

Bound. With u = 2^-23 (tensor cores truncate; FP32 arithmetic rounds at 2^-24), a sum of K exact products in any order
is within (K + 16) u sum |a||w| of the true one, where 16 covers factors and bias; one rounding to BF16 adds 2^-8 |y|.
Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, QuantTensor, dequantize, quantize
from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed
from onegrid.model.canonical import Canonical, Snapshot
from onegrid.model.stacks import is_stack, stack_key
from onegrid.recipe import Plan
from onegrid.sampler.base import Sampler

CHECK, CONDITION = "selfcheck", "C3"
UNIT = 2.0**-23
ROWS = 16


def due(keys: Sequence[str], *, version: int, per_sync: int) -> list[str]:
    """The linears whose turn it is at `version`."""
    if not keys:
        return []
    count = min(per_sync, len(keys))
    return [keys[(version * count + i) % len(keys)] for i in range(count)]


def turns(num_keys: int, per_sync: int) -> int:
    """Within how many synchronizations every linear has its turn."""
    return math.ceil(num_keys / max(1, per_sync))


def linears(plan: Plan) -> dict[str, list[str]]:
    """Storage key -> canonical names of every linear of a plan, in order."""
    keys: dict[str, list[str]] = {}
    for name, planned in plan.tensors.items():
        if len(planned.shape) == 2 and name.endswith("_proj.weight"):
            keys.setdefault(stack_key(name), []).append(name)
    return keys


@torch.no_grad()
def selfcheck(plan: Plan, sampler: Sampler, snapshot: Snapshot, *, per_sync: int) -> Verdict:
    """Kernels of the linears that are due, every expert of a due layer."""
    return closed(CHECK, CONDITION, lambda: _check(plan, sampler, snapshot, per_sync))


def _check(plan: Plan, sampler: Sampler, snapshot: Snapshot, per_sync: int) -> Verdict:
    multiply = getattr(sampler, "multiply", None)
    keys = linears(plan)
    if multiply is None or not keys:
        found = "it has no multiply()" if keys else "no linear in the plan"
        return could_not_tell(CHECK, CONDITION, expected="products of the live kernels", found=found)
    wrong: list[str] = []
    where: list[str] = []
    for key in due(list(keys), version=snapshot.version, per_sync=per_sync):
        names = keys[key]
        x = _inputs(plan[names[0]].shape[1], len(names) if is_stack(key) else None, snapshot)
        y = multiply(key, x)
        for index, name in enumerate(names):
            x_MK, y_MN = (x[index], y[index]) if is_stack(key) else (x, y)
            bias = snapshot.tensors.get(name.removesuffix("weight") + "bias")
            excess = _excess(x_MK, y_MN, snapshot.tensors[name], plan[name].sampler_activation, bias)
            if excess > 1.0:
                wrong.append(name)
                where.append(f"{name}: error {excess:.3g} times its bound")
    if wrong:
        return failed(
            CHECK,
            CONDITION,
            tensors=wrong,
            expected="products within the derived bound of the reference",
            found=f"{len(wrong)} linears outside",
            where=where[:8],
            cause="operands that the kernels read are not those of this version, or the kernel has another input grid",
        )
    return passed(CHECK, CONDITION)


def _inputs(width: int, num_experts: int | None, snapshot: Snapshot) -> Tensor:
    """BF16 [ROWS, width], or one of them per expert; the same for the same version."""
    generator = torch.Generator().manual_seed(snapshot.version)
    shape = (ROWS, width) if num_experts is None else (num_experts, ROWS, width)
    x = torch.randn(shape, generator=generator).to(torch.bfloat16)
    first = next(iter(snapshot.tensors.values()))
    return x.to(first.codes.device if isinstance(first, QuantTensor) else first.device)


def _excess(x_MK: Tensor, y_MN: Tensor, weight: Canonical, activation: str | None, bias: Canonical | None) -> float:
    """Largest error over its bound; infinite where an output is not finite."""
    a_MK = x_MK.double() if activation is None else _wide(quantize(x_MK, QUANTIZERS[activation]))
    w_NK = _wide(weight)
    want_MN = a_MK @ w_NK.mT
    size_MN = a_MK.abs() @ w_NK.abs().mT
    if isinstance(bias, Tensor):
        want_MN, size_MN = want_MN + bias.double(), size_MN + bias.double().abs()
    bound_MN = (a_MK.shape[-1] + 16) * UNIT * size_MN + 2.0**-8 * want_MN.abs() + 2.0**-126
    ratio_MN = (y_MN.double() - want_MN).abs() / bound_MN
    return math.inf if not bool(torch.isfinite(ratio_MN).all()) else float(ratio_MN.max())


def _wide(x: Canonical) -> Tensor:
    return (dequantize(x) if isinstance(x, QuantTensor) else x).double()
