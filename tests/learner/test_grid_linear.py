"""The three matmuls of a linear against float64 autograd of the same grid function, straight through the rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, dequantize, quantize
from onegrid.learner.grid_linear import GridLinear, Input, Site
from onegrid.ops.operand import operand, operand_of

QUANTIZED = [
    ("mxfp8", "mxfp8", "mxfp8"),
    ("mxfp8", "mxfp8", "mxfp8_e5m2"),
    ("mxfp4", "mxfp4", "mxfp4"),
    ("fp8_row", "fp8_row", "fp8_row"),
    ("fp8_tensor", "fp8_tensor", "fp8_tensor"),
    ("fp8_128x128", "fp8_1x128", "fp8_1x128"),
    ("fp8_128x128_fp32", "fp8_1x128_fp32", "fp8_1x128_fp32"),
]
FOUR_BIT = [("nvfp4", "nvfp4_row", None), ("nvfp4_2d", "nvfp4", None)]
CASES = [(*q, mode) for q in QUANTIZED for mode in ("quantized", "high_precision", "dequantized")]
CASES += [(*q, mode) for q in FOUR_BIT for mode in ("high_precision", "dequantized")]
CASES += [(None, None, None, "high_precision")]


def grid(x: Tensor, name: str | None, axis: int = -1) -> Tensor:
    """float64 values of `x` on a quantizer's grid."""
    return x.double() if name is None else dequantize(quantize(x, QUANTIZERS[name], axis=axis)).double()


def straight_through(x: Tensor, name: str | None) -> Tensor:
    return x + (grid(x.detach().to(torch.bfloat16), name) - x).detach()


@pytest.mark.parametrize(("weight", "activation", "gradient", "mode"), CASES)
@pytest.mark.parametrize("shape", [(48, 64, 96), (3, 16, 64, 32)], ids=["dense", "experts"])
def test_gradients_equal_float64_autograd_of_the_grid_function(weight, activation, gradient, mode, shape, device):
    generator = torch.Generator().manual_seed(0)
    lead, (m, k, n) = shape[:-3], shape[-3:]
    x = torch.randn(*lead, m, k, generator=generator).to(device, torch.bfloat16)
    master = (torch.randn(*lead, n, k, generator=generator) * 0.1).to(device)
    dy = torch.randn(*lead, m, n, generator=generator).to(device, torch.bfloat16)
    bias = torch.randn(n, generator=generator).to(device, torch.bfloat16).float() if not lead else None

    qw, qa, qg = (None if name is None else QUANTIZERS[name] for name in (weight, activation, gradient))
    live = operand(master.to(torch.bfloat16), None) if qw is None else operand_of(quantize(master.bfloat16(), qw))
    site = Site("layer", live, qw, qg, mode)
    leaf_x, leaf_w = x.clone().requires_grad_(), master.clone().requires_grad_()
    y = GridLinear.apply(leaf_x, leaf_w, bias, Input(x, operand(x, qa), qa), site)
    y.backward(dy)
    assert site.calls == {mode: 1}

    x64, w64 = x.double().requires_grad_(), master.bfloat16().double().requires_grad_()
    y64 = straight_through(x64, activation) @ straight_through(w64, weight).mT
    if bias is not None:
        y64 = y64 + bias.double()
    if mode == "dequantized":
        y64.backward(dy.double())
    elif mode == "high_precision":
        (x64 @ w64.mT).backward(dy.double())
    else:
        w_bf16 = master.bfloat16()
        x64.grad = grid(dy, gradient) @ grid(w_bf16, weight, axis=-2)
        w64.grad = grid(dy, gradient, axis=-2).mT @ grid(x, activation, axis=-2)

    def close(have: Tensor, want: Tensor, terms: int, rounding: float) -> None:
        # FP32 sums of `terms` products of numbers of size s err by at most terms 2^-24 sum|products|; the values of
        # formats with a factor (NVFP4, FP8 with FP32 scales) are rounded to BF16 first in a BF16 backward: 2^-9 each.
        scale = want.abs().amax() + terms**0.5
        folded = 2**-8 if mode == "dequantized" and QUANTIZERS[weight or "mxfp8"].matmul != "decoded" else 0.0
        assert (have.double() - want).abs().amax() <= scale * (rounding + folded + terms * 2**-22)

    close(y.detach(), y64.detach(), k, 2**-8)
    close(leaf_x.grad, x64.grad, n, 2**-8)
    close(leaf_w.grad, w64.grad, m, 0.0)
    assert leaf_w.grad.dtype == torch.float32 and leaf_x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["quantized", "high_precision", "dequantized"])
def test_backward_modes_differ_from_each_other(mode, device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator).to(device, torch.bfloat16)
    master = torch.randn(32, 64, generator=generator).to(device)
    dy = torch.randn(32, 32, generator=generator).to(device, torch.bfloat16)
    q = QUANTIZERS["mxfp8"]
    grads = {}
    for each in ("quantized", "high_precision", "dequantized"):
        leaf = master.clone().requires_grad_()
        site = Site("layer", operand_of(quantize(master.bfloat16(), q)), q, q, each)
        GridLinear.apply(x.clone().requires_grad_(), leaf, None, Input(x, operand(x, q), q), site).backward(dy)
        grads[each] = leaf.grad
    others = [grads[other] for other in grads if other != mode]
    assert all(not torch.equal(grads[mode], other) for other in others)


@pytest.mark.parametrize("rows", [(0, 32), (2, 0, 32)])
def test_case_Q18_zero_tokens_give_empty_outputs_and_zero_weight_gradients(rows, device):
    q = QUANTIZERS["mxfp8"]
    master = torch.ones(*rows[:-2], 48, 32, device=device, requires_grad=True)
    x = torch.zeros(rows, dtype=torch.bfloat16, device=device, requires_grad=True)
    site = Site("layer", operand_of(quantize(master.detach().bfloat16(), q)), q, q, "quantized")
    y = GridLinear.apply(x, master, None, Input(x.detach(), operand(x.detach(), q), q), site)
    y.backward(torch.zeros_like(y))
    assert y.shape == (*rows[:-1], 48)
    assert master.grad.shape == master.shape and not master.grad.any()
