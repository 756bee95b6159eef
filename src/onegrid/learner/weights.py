"""The decoder's weights on the side with gradients: FP32 masters, and a forward that reads the published codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import QUANTIZERS, Quantizer
from onegrid.learner.experts import in_one
from onegrid.learner.grid_linear import GridLinear, Input, Site
from onegrid.learner.native_grid import native_inputs
from onegrid.model.decoder import EMBEDDING
from onegrid.model.live import LiveWeights, send, spans_rows
from onegrid.model.stacks import is_stack
from onegrid.ops.grouped import Dispatch, Scatter
from onegrid.ops.native import transposed
from onegrid.ops.operand import Operand, operand
from onegrid.ops.pins import TILE

BACKWARD_MODES = ("quantized", "high_precision", "dequantized")


class StraightThrough(torch.autograd.Function):
    """The live BF16 value forward; its gradient goes to the FP32 master unchanged. Bengio et al., arXiv 1308.3432."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, value: Tensor) -> Tensor:
        """FP32 holding BF16 values, so that gradients keep their precision on the way back."""
        return value.float().view_as(master)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Identity."""
        return dy, None


class Embedding(torch.autograd.Function):
    """Rows of the live BF16 values; gradients go to the FP32 master, rows of one token added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, value: Tensor, tokens_N: Tensor) -> Tensor:
        """master FP32 [V, D]; value [V, D] of BF16 values. Returns BF16 [N, D]."""
        ctx.num_rows = len(master)
        ctx.save_for_backward(tokens_N)
        return torch.nn.functional.embedding(tokens_N, value).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """FP32 [V, D]. On a GPU torch's own adds by atomics where few tokens repeat often; an index put sorts first."""
        (tokens_N,) = ctx.saved_tensors
        if dy.is_cuda:
            grad = dy.new_zeros(ctx.num_rows, dy.shape[-1], dtype=torch.float32)
            return grad.index_put_((tokens_N,), dy.float(), accumulate=True), None, None
        return torch.ops.aten.embedding_dense_backward(dy.float(), tokens_N, ctx.num_rows, -1, False), None, None


class GradWeights:
    """Implements `model.decoder.Weights` with gradients to `masters` (FP32 by storage key)."""

    def __init__(self, live: LiveWeights, masters: dict[str, Tensor]) -> None:
        self.live, self.masters = live, masters
        self.sites = {key: self._site(key) for key, master in masters.items() if master.dim() >= 2}
        stacked = [(live.activation[key], site) for key, site in self.sites.items() if is_stack(key)]
        self.apart_A: Tensor | None = None
        """Of the micro-batch at hand: `packing.Packed.apart_A`."""
        self.tile = max([TILE, *(_block_of_tokens(activation, site) for activation, site in stacked)])

    def _site(self, key: str) -> Site:
        planned = self.live.plan[self.live.keys[key][0]]
        quantizer = None if planned.weight is None else QUANTIZERS[planned.weight]
        gradient = None if planned.gradient is None else QUANTIZERS[planned.gradient]
        mode = planned.backward if quantizer is not None or planned.activation is not None else None
        mode = mode or "high_precision"
        if mode not in BACKWARD_MODES:
            raise CapabilityError(f"{key}: backward mode {mode!r} is not one of {', '.join(BACKWARD_MODES)}")
        if key in self.live.native and mode == "quantized" and quantizer is not None and quantizer.span == "row":
            raise CapabilityError(
                f'recipe.matmul = "native", {key}: {quantizer} has its scales along the contraction of fprop, so dgrad '
                'and wgrad have no native products; use backward "dequantized" or "high_precision"'
            )
        return Site(key, self.live.operands.get(key), quantizer, gradient, mode, partial(self.live.read, key))

    @property
    def can_capture(self) -> bool:
        """Whether no backward pass waits for the host."""
        stacked = [(self.live.activation[key], site) for key, site in self.sites.items() if is_stack(key)]
        return all(site.backward != "quantized" or in_one(activation, site) for activation, site in stacked)

    def refresh(self) -> None:
        """Once per version: transposes of native operands, which every micro-batch reads, into the same storage."""
        for key, site in self.sites.items():
            if key not in self.live.native or site.backward != "quantized":
                continue
            new = transposed(site.published())
            if site.transposed is None:
                site.transposed = new
            else:
                for have, want in ((site.transposed.values, new.values), (site.transposed.block, new.block)):
                    if have is not None and want is not None:
                        have.copy_(want)
                if site.transposed.row is not None and new.row is not None:
                    site.transposed = Operand(site.transposed.values, new.kind, new.row, site.transposed.block)

    def tensor(self, name: str) -> Tensor:
        """See `model.decoder.Weights`."""
        return StraightThrough.apply(self.masters[name], self.live.tensor(name))

    def embedded(self, tokens_N: Tensor) -> Tensor:
        """See `model.decoder.Weights`."""
        return Embedding.apply(self.masters[EMBEDDING], self.live.tensor(EMBEDDING), tokens_N)

    def linear(
        self, keys: tuple[str, ...], x: Tensor, dispatch: Dispatch | None = None, *, sent: bool = False
    ) -> list[Tensor]:
        """See `model.decoder.Weights`. The activations are quantized once for all keys, before they go to experts."""
        quantizer = self.live.activation[keys[0]]
        if sent and dispatch is not None and spans_rows(quantizer):
            x = dispatch.cleared(x)
        columns = None
        if quantizer is not None and keys[0] in self.live.native:
            back = torch.is_grad_enabled() and self.sites[keys[0]].backward == "quantized"
            rowwise, columns = native_inputs(x.detach(), quantizer, columns=back)
        else:
            rowwise = operand(x.detach(), quantizer)
        if dispatch is not None and not sent:
            x, rowwise = Scatter.apply(x, dispatch), send(rowwise, dispatch)
        shared = Input(x.detach(), rowwise, quantizer, dispatch, self.apart_A if dispatch is None else None)
        if columns is not None:
            shared.columns[None] = columns
        return [GridLinear.apply(x, self.masters[key], self._bias(key), shared, self.sites[key]) for key in keys]

    def fuses(self, key: str, width: int) -> Quantizer | None:
        """None: gradients need the activations themselves."""
        return None

    def _bias(self, key: str) -> Tensor | None:
        name = key.removesuffix("weight") + "bias"
        return self.tensor(name) if name in self.masters else None


def _block_of_tokens(activation: Quantizer | None, site: Site) -> int:
    """Tokens that share a scale in the column-wise operands of a quantized backward."""
    if site.backward != "quantized":
        return 1
    return max(1 if q is None else q.block[1] or 1 for q in (activation, site.gradient))
