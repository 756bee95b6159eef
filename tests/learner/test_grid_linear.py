"""The three matmuls of a linear against float64 autograd of the same grid function, straight through the rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, dequantize, quantize
from onegrid.learner.grid_linear import GridLinear, Input, Site
from onegrid.ops.grouped import Dispatch
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


def places_of(ends: list[int], device: torch.device) -> Dispatch:
    """Experts whose places end there, of one token a place."""
    place = torch.arange(ends[-1], device=device)
    return Dispatch(place[:, None], place, place, torch.tensor(ends, dtype=torch.int32, device=device))


def straight_through(x: Tensor, name: str | None) -> Tensor:
    return x + (grid(x.detach().to(torch.bfloat16), name) - x).detach()


@pytest.mark.parametrize(("weight", "activation", "gradient", "mode"), CASES)
@pytest.mark.parametrize("experts", [0, 3], ids=["dense", "experts"])
def test_gradients_equal_float64_autograd_of_the_grid_function(weight, activation, gradient, mode, experts, device):
    generator = torch.Generator().manual_seed(0)
    m, k, n = (384 if experts else 48), 64, 96  # an expert begins with a block of 128 tokens
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    master = (torch.randn(*([experts] if experts else []), n, k, generator=generator) * 0.1).to(device)
    dy = torch.randn(m, n, generator=generator).to(device, torch.bfloat16)
    bias = None if experts else torch.randn(n, generator=generator).to(device, torch.bfloat16).float()
    groups = [(0, slice(0, m // 3)), (2, slice(m // 3, m))] if experts else None  # expert 1 has no token
    places = places_of([m // 3, m // 3, m], device) if experts else None

    qw, qa, qg = (None if name is None else QUANTIZERS[name] for name in (weight, activation, gradient))
    live = operand(master.to(torch.bfloat16), None) if qw is None else operand_of(quantize(master.bfloat16(), qw))
    site = Site("layer", live, qw, qg, mode)
    leaf_x, leaf_w = x.clone().requires_grad_(), master.clone().requires_grad_()
    y = GridLinear.apply(leaf_x, leaf_w, bias, Input(x, operand(x, qa), qa, places), site)
    y.backward(dy)
    assert set(site.calls) == {mode}

    parts = groups or [(slice(None), slice(None))]
    y64, dx64 = torch.zeros(m, n, dtype=torch.float64), torch.zeros(m, k, dtype=torch.float64)
    dw64 = torch.zeros_like(master, dtype=torch.float64)
    for expert, rows in parts:
        x_e, w_e, dy_e = x[rows], master[expert].bfloat16(), dy[rows]
        x_leaf, w_leaf = x_e.double().requires_grad_(), w_e.double().requires_grad_()
        # one scale of a tensorwise activation spans all rows, so the grid is that of the whole
        on_grid = grid(x, activation)[rows]
        y_e = (x_leaf + (on_grid - x_leaf).detach()) @ straight_through(w_leaf, weight).mT
        y64[rows] = (y_e if bias is None else y_e + bias.double()).detach().cpu()
        if mode == "dequantized":
            y_e.backward(dy_e.double())
        elif mode == "high_precision":
            (x_leaf @ w_leaf.mT).backward(dy_e.double())
        else:
            x_leaf.grad = grid(dy_e, gradient) @ grid(w_e, weight, axis=-2)
            w_leaf.grad = grid(dy_e, gradient, axis=-2).mT @ grid(x_e, activation, axis=-2)
        dx64[rows], dw64[expert] = x_leaf.grad.cpu(), w_leaf.grad

    def close(have: Tensor, want: Tensor, terms: int, rounding: float) -> None:
        # FP32 sums of `terms` products of numbers of size s err by at most terms 2^-24 sum|products|; the values of
        # formats with a factor (NVFP4, FP8 with FP32 scales) are rounded to BF16 first in a BF16 backward: 2^-9 each.
        scale = want.abs().amax() + terms**0.5
        folded = 2**-8 if mode == "dequantized" and QUANTIZERS[weight or "mxfp8"].matmul != "decoded" else 0.0
        assert (have.double() - want).abs().amax() <= scale * (rounding + folded + terms * 2**-22)

    close(y.detach().cpu(), y64, k, 2**-8)
    close(leaf_x.grad.cpu(), dx64, n, 2**-8)
    close(leaf_w.grad, dw64, m, 0.0)
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


@pytest.mark.parametrize("experts", [0, 2], ids=["dense", "experts"])
def test_case_Q18_zero_tokens_give_empty_outputs_and_zero_weight_gradients(experts, device):
    q = QUANTIZERS["mxfp8"]
    master = torch.ones(*([experts] if experts else []), 48, 32, device=device, requires_grad=True)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    site = Site("layer", operand_of(quantize(master.detach().bfloat16(), q)), q, q, "quantized")
    shared = Input(x.detach(), operand(x.detach(), q), q, places_of([0] * experts, device) if experts else None)
    y = GridLinear.apply(x, master, None, shared, site)
    y.backward(torch.zeros_like(y))
    assert y.shape == (0, 48)
    assert master.grad.shape == master.shape and not master.grad.any()
