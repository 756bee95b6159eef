"""The three matmuls of a linear layer on the grid, on one page.

    fprop   Y [M, N] = X [M, K]  W [N, K]^T     both quantized along K; W's codes are those the snapshot publishes
    dgrad   dX [M, K] = dY [M, N]  W [N, K]     contraction over N
    wgrad   dW [N, K] = dY [M, N]^T  X [M, K]   contraction over M, the tokens

    backward         dgrad operands                       wgrad operands
    quantized        dY along N, W along N (column-wise)  dY along M, X along M (column-wise)
    high_precision   dY and W in BF16                     dY and X in BF16
    dequantized      dY in BF16, W from its codes         dY in BF16, X from its codes

Column-wise operands come from the high-precision tensors, never from the row-wise codes. Quantization itself has the
straight-through gradient (Bengio et al., arXiv 1308.3432). Stacked experts do the same, each with its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.learner.experts import expert_gradients, in_one
from onegrid.learner.native_grid import native_gradients
from onegrid.ops.grouped import Dispatch, grouped_matmul, take
from onegrid.ops.linear import dot, matmul
from onegrid.ops.native import is_native
from onegrid.ops.operand import Operand, compute_dtype, dequantized, operand


@dataclass(slots=True)
class Input:
    """Activations shared by the linears that read them (q, k and v; gate and up), quantized once per direction."""

    x: Tensor
    """BF16 [M, K], detached."""
    rowwise: Operand
    quantizer: Quantizer | None
    places: Dispatch | None = None
    """Which rows belong to which expert, where the weight is a stack."""
    apart_A: Tensor | None = None
    """Row of each place of the column-wise operands; see `packing.Packed`. None where rows lie as they must."""
    columns: dict[int | None, Operand] = field(default_factory=dict)

    def columnwise(self, expert: int | None, rows: slice) -> Operand:
        """X along M: [K, M] of some rows, computed once."""
        if expert not in self.columns:
            self.columns[expert] = operand(self.blocks(self.x[rows]), self.quantizer, axis=-2)
        return self.columns[expert]

    def blocks(self, x_MK: Tensor) -> Tensor:
        """Rows as the blocks of a column-wise operand need them: no block holds two sequences, or two experts."""
        return x_MK if self.apart_A is None else take(x_MK, self.apart_A)


@dataclass(slots=True)
class Site:
    """One weight of one version: what the three matmuls need besides activations."""

    key: str
    rowwise: Operand | None
    """The live operand, derived from the published codes; None where none is kept."""
    weight: Quantizer | None
    gradient: Quantizer | None
    backward: str
    """ "quantized", "high_precision" or "dequantized"; unquantized layers use "high_precision"."""
    read: Callable[[], Operand] | None = None
    """Derives the operand from the published codes now, where none is kept."""
    transposed: Operand | None = None
    """Of native operands, W along N for dgrad; made once per version."""
    calls: dict[str, int] = field(default_factory=dict)
    """How often each backward mode really ran, counted where it runs: a mode that is asked for and ignored is seen."""

    def published(self) -> Operand:
        """The operand of the published codes."""
        if self.rowwise is not None:
            return self.rowwise
        assert self.read is not None
        return self.read()

    def count(self, mode: str) -> None:
        """One more matrix went back in `mode`."""
        self.calls[mode] = self.calls.get(mode, 0) + 1


class GridLinear(torch.autograd.Function):
    """Y = X W^T on the grid, with the backward mode of its site. The table above is the whole definition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, bias: Tensor | None, shared: Input, site: Site) -> Tensor:
        """x BF16 [M, K]; master FP32 [N, K] or a stack [E, N, K]; bias FP32 [N] of BF16 values. Returns BF16 [M, N]."""
        ctx.shared, ctx.site, ctx.has_bias = shared, site, bias is not None
        ctx.save_for_backward(master)
        if shared.places is not None:
            return grouped_matmul(shared.rowwise, site.published(), shared.places)
        return matmul(shared.rowwise, site.published(), bias_N=bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dX BF16 [M, K], dW FP32 like the master (None where the master is frozen), db FP32 [N]."""
        (master,) = ctx.saved_tensors
        shared, site = ctx.shared, ctx.site
        trained = ctx.needs_input_grad[1]
        if shared.places is None:
            dx, dw = _dgrad_wgrad(dy, master, shared, site, trained=trained)
            db = dy.float().sum(0) if ctx.has_bias else None
            return dx, dw, db, None, None
        if site.backward != "quantized" or in_one(shared.quantizer, site):
            return *expert_gradients(dy, master, shared, site, trained=trained), None, None, None
        dx, dw = torch.empty_like(shared.x), torch.zeros_like(master) if trained else None
        for expert, rows in shared.places.groups():
            dx[rows], part = _dgrad_wgrad(
                dy[rows], master[expert], shared, site, expert=expert, rows=rows, trained=trained
            )
            if dw is not None and part is not None:
                dw[expert] = part
        return dx, dw, None, None, None


def _dgrad_wgrad(
    dy: Tensor,
    master: Tensor,
    shared: Input,
    site: Site,
    *,
    trained: bool,
    expert: int | None = None,
    rows: slice = slice(None),
) -> tuple[Tensor, Tensor | None]:
    """dX BF16 [M, K] and, of a trained weight, dW FP32 [N, K] of one matrix, by the table above."""
    if site.backward == "quantized" and is_native(shared.rowwise.kind):
        return native_gradients(dy, shared, site, trained=trained)
    if site.backward == "quantized":
        site.count("quantized")
        weight_KN = operand(master.to(torch.bfloat16), site.weight, axis=-2)
        dx = matmul(operand(dy, site.gradient), weight_KN)
        if not trained:
            return dx, None
        columns = shared.columnwise(expert, rows)
        return dx, matmul(operand(shared.blocks(dy), site.gradient, axis=-2), columns, out_dtype=torch.float32)
    dtype = compute_dtype(dy.device)
    if site.backward == "dequantized":
        site.count("dequantized")
        published = site.published() if expert is None else site.published().part(expert)
        w, x = dequantized(published), dequantized(shared.rowwise.part(rows))
    else:
        site.count("high_precision")
        # The live operand of an unquantized weight is the master in BF16 already.
        plain = site.weight is None and expert is None
        w = site.published().values if plain else master.to(torch.bfloat16).to(dtype)
        x = shared.x[rows]
    dy, x = dy.to(dtype), x.to(dtype)
    return matmul(Operand(dy), Operand(w.mT)), dot(dy.mT, x.mT) if trained else None
