"""Self-check (C3, C6): what live kernels make of fixed inputs, against a reference product of the published weights.

The reference decodes the learner's codes and the activations of the plan's grid and multiplies in FP64. Linears take
turns by version, so that with n of them and m a synchronization each one, with all its experts, is reached within
ceil(n / m) synchronizations.

Bound. With u = 2^-23 (tensor cores truncate; FP32 arithmetic rounds at 2^-24), a sum of K exact products in any order
is within (K + 16) u sum |a||w| of the true one, where 16 covers factors and bias, and the sum is at most |a| |w| in
Euclidean norms; one rounding to BF16 adds 2^-8 |y|. Higham, Accuracy and Stability of Numerical Algorithms (2002),
section 3.1.

Native FP8 (`recipe.matmul = "native"`) on Hopper has a wider one. One instruction adds 32 products to a partial sum: it
aligns all 33 to the largest exponent, cuts each to 13 fraction bits, adds exactly, and cuts the sum to 13. No addend is
larger than S = sum |a||w| of the 128 products of a block, so each of 33 cuts loses less than 2^-13 S, and the last
2^-13 of a sum that is no larger than S: 34 a step, but the first step's partial sum is 0 and cuts nothing, 4 steps a
block: 135 x 2^-13 S, 1.65 % of S (a count that leaves the cut of each sum out gives 132). That partial sums may be too
large by as much multiplies this by 1 + 135 x 2^-13. Blocks are added in FP32, whose bound is above; codes with one
scale a row or tensor are taken to be added in blocks of 128 too, fast accumulation being off. It is a bound for all
inputs: random ones have errors some hundred times smaller. So it sees kernels that read other operands, not single
codes, which digest and operands see. The alignment is that of MMA-Sim (arXiv 2511.10909).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, QuantTensor, dequantize, quantize
from onegrid.guard.turns import due
from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed
from onegrid.model.canonical import Canonical, Snapshot
from onegrid.model.stacks import is_stack, stack_key
from onegrid.recipe import Plan
from onegrid.sampler.base import Sampler

CHECK, CONDITION = "selfcheck", "C3"
UNIT = 2.0**-23
NATIVE_UNIT = 2.0**-13
STEP, BLOCK = 32, 128
"""Products of one FP8 instruction, and of one partial sum."""
ROWS = 16


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
        bias = [snapshot.tensors.get(name.removesuffix("weight") + "bias") for name in names]
        weights = [snapshot.tensors[name] for name in names]
        stacked = is_stack(key)
        activation = plan[names[0]].sampler_activation
        excess_E = _excess(
            x if stacked else x[None],
            y if stacked else y[None],
            weights,
            activation,
            bias[0],
            native=plan.matmul == "native" and not stacked and activation is not None,
        )
        for name, excess in zip(names, excess_E.tolist(), strict=True):
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


def _excess(
    x_EMK: Tensor,
    y_EMN: Tensor,
    weights: Sequence[Canonical],
    activation: str | None,
    bias_N: Canonical | None,
    *,
    native: bool,
) -> Tensor:
    """FP64 [E]: largest error of every matrix over its bound; infinite where an output is not finite."""
    a_EMK = (x_EMK if activation is None else dequantize(quantize(x_EMK, QUANTIZERS[activation]))).double()
    w_ENK = _values(weights).double()
    want_EMN = torch.bmm(a_EMK, w_ENK.mT)
    size_EMN = a_EMK.norm(dim=-1)[:, :, None] * w_ENK.norm(dim=-1)[:, None, :]
    width = a_EMK.shape[-1]
    bound_EMN = (width + 16) * UNIT * size_EMN
    if native and isinstance(weights[0], QuantTensor):
        bound_EMN = bound_EMN + native_loss() * torch.bmm(a_EMK.abs(), w_ENK.abs().mT)
    if isinstance(bias_N, Tensor):
        want_EMN = want_EMN + bias_N.double()
        bound_EMN = bound_EMN + (width + 16) * UNIT * bias_N.double().abs()
    bound_EMN = bound_EMN * (1 + 2.0**-8) + 2.0**-8 * want_EMN.abs() + 2.0**-126
    ratio_EMN = (y_EMN.double() - want_EMN).abs() / bound_EMN
    return ratio_EMN.nan_to_num(nan=torch.inf, posinf=torch.inf).amax((-2, -1))


def native_loss() -> float:
    """Largest error of a native FP8 partial sum of BLOCK products, over the sum of their sizes; see above."""
    loss = (BLOCK // STEP * (STEP + 2) - 1) * NATIVE_UNIT
    return loss * (1 + loss)


def _values(weights: Sequence[Canonical]) -> Tensor:
    """FP32 or BF16 [E, N, K] of tensors of one format and shape, in one go."""
    first = weights[0]
    if isinstance(first, Tensor):
        return torch.stack([w for w in weights if isinstance(w, Tensor)])
    quantized = [w for w in weights if isinstance(w, QuantTensor)]
    return dequantize(
        dataclasses.replace(
            first,
            codes=torch.stack([w.codes for w in quantized]),
            scales=torch.stack([w.scales for w in quantized]),
            amax=None if first.amax is None else torch.stack([w.amax for w in quantized if w.amax is not None]),
            factor=None,
            shape=(len(weights), *first.shape),
        )
    )
