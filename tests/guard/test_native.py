"""The self-check's bound for native FP8 products: sums of 13 bits are within it, products of other operands are not."""

from __future__ import annotations

import dataclasses

import torch

from onegrid.formats import QUANTIZERS, QuantTensor, dequantize, quantize
from onegrid.guard.selfcheck import BLOCK, STEP, native_loss, selfcheck
from onegrid.rl.loop import snapshot
from tests.guard.pair import Pair


def cut(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """FP64 x without what lies below 13 fraction bits of 2^exponent, toward zero."""
    unit = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 13)
    return (x / unit).trunc() * unit


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|) from the bits; far below everything for 0."""
    return torch.where(x == 0, torch.full_like(x, -200.0), torch.frexp(x)[1] - 1).to(torch.int32)


def native_sum(a_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """FP64 [M, N]: the sum of a block's products as the instruction makes it, in steps of 32."""
    total = torch.zeros(len(a_MK), len(w_NK), dtype=torch.float64)
    for start in range(0, a_MK.shape[1], STEP):
        products = a_MK[:, None, start : start + STEP] * w_NK[None, :, start : start + STEP]
        addends = torch.cat([total[..., None], products], -1)
        largest = exponent_of(addends).amax(-1, keepdim=True)
        whole = cut(addends, largest).sum(-1)
        total = cut(whole, exponent_of(whole))
    return total


def inputs(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Element values of E4M3 [16, 128] and [24, 128]."""
    draw = [torch.randn(rows, BLOCK, generator=generator) for rows in (16, 24)]
    if kind == "positive":
        draw = [x.abs() for x in draw]
    elif kind == "spread":
        draw = [x * torch.exp2(torch.randint(-6, 6, x.shape, generator=generator)) for x in draw]
    elif kind == "worst":  # one large product first, then many that are cut whole
        draw = [torch.full_like(x, 2.0**-7) for x in draw]
        for x in draw:
            x[:, 0] = 1.0
    q = QUANTIZERS["fp8_1x128_fp32"]
    a, w = (dequantize(quantize(x.to(torch.bfloat16), q)).double() for x in draw)
    return a, w


def test_sums_of_13_bits_are_within_the_derived_bound_and_the_worst_come_near_it():
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for kind in ("normal", "positive", "spread", "worst"):
        a, w = inputs(kind, generator)
        size = a.abs() @ w.abs().mT
        worst = max(worst, float(((native_sum(a, w) - a @ w.mT).abs() / size).max()))
        assert worst <= native_loss()
    assert worst > native_loss() / 4  # so the bound is not idle
    assert abs(native_loss() / (135 * 2.0**-13) - 1) < 0.02


def test_the_self_check_of_a_native_plan_takes_sums_of_13_bits_and_refuses_other_operands():
    pair = Pair("tied", "fp8_block")
    plan, held = pair.learner.plan, snapshot(pair.learner)
    stale = {name: tensor for name, tensor in held.tensors.items()}
    native = dataclasses.replace(plan, matmul="native")

    def multiply(key: str, x: torch.Tensor) -> torch.Tensor:
        activation = plan[key].sampler_activation
        a = dequantize(quantize(x, QUANTIZERS[activation])).double()
        tensor = stale[key]
        assert isinstance(tensor, QuantTensor)
        w = dequantize(tensor).double()
        sums = [native_sum(a[:, i : i + BLOCK], w[:, i : i + BLOCK]) for i in range(0, a.shape[1], BLOCK)]
        return torch.stack(sums).sum(0).float().to(torch.bfloat16)

    pair.sampler.multiply = multiply
    assert selfcheck(native, pair.sampler, held, per_sync=99).passed
    names = [n for n in stale if n.endswith("gate_proj.weight")]
    stale[names[0]], stale[names[1]] = stale[names[1]], stale[names[0]]
    assert set(selfcheck(native, pair.sampler, held, per_sync=99).tensors) == set(names)
