"""A micro-batch of the decoder as two CUDA graphs, forward and backward, so that its hundreds of launches cost the host
nothing, in low precision as in BF16.

Rows, sequences and the longest sequence are rounded up to buckets, in every micro-batch, captured or not, so that the
same micro-batch always runs the same kernels. The first one of a bucket runs as it is, which lets compilers and
libraries prepare themselves; the second is captured. Embedding, head and loss stay outside. Gradients are summed in
place into the masters' `.grad`, which therefore stay allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onegrid.learner.config import LearnerConfig
from onegrid.learner.packing import Packed
from onegrid.learner.weights import GradWeights
from onegrid.model.decoder import Rows
from onegrid.ops.capture import capturing
from onegrid.ops.packed_attention import Segments
from onegrid.ops.pins import round_up
from onegrid.ops.table import Kernels

Decode = Callable[[Tensor, Rows, Segments], Tensor]
"""(embedded rows [R, D], rows, segments) -> hidden states [R, D], with gradients."""
MOST = 8
"""Buckets that are captured; each holds the activations of a micro-batch."""


def refusal(config: LearnerConfig, device: torch.device, kernels: Kernels, weights: GradWeights) -> str:
    """Why micro-batches are not captured; "" where they are."""
    reasons = {
        "learner.capture is false": not config.capture,
        f"the device is {device}": device.type != "cuda",
        "learner.recompute runs layers again": config.recompute,
        "learner.lora merges weights that graphs would keep": config.lora is not None,
        'learner.weights = "codes" keeps no operand that graphs could read': config.weights == "codes",
        f"{kernels.name} kernels wait for the host": not kernels.can_capture,
        "a quantized backward of experts waits for the host": not weights.can_capture,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def bucket_rows(num_rows: int, multiple: int) -> int:
    """Rows of the bucket: steps of an eighth, whole multiples, at least 128."""
    step = max(128, 1 << max(0, num_rows - 1).bit_length() >> 3)
    return round_up(max(1, num_rows), round_up(step, multiple))


def bucket_segments(segments: Segments) -> Segments:
    """The same sequences and empty ones, up to a power of two, with a power of two as the longest."""
    count = 1 << max(0, len(segments.first_B) - 1).bit_length()
    missing = count - len(segments.first_B)
    first_B, length_B = (torch.nn.functional.pad(t, (0, missing)) for t in (segments.first_B, segments.length_B))
    longest = max(64, 1 << max(0, segments.longest - 1).bit_length())
    return Segments(first_B, length_B, longest, segments.rectangle)


@dataclass(slots=True)
class Run:
    """One bucket's graphs and what they read and write."""

    x_RD: Tensor
    rows: Rows
    segments: Segments
    dhidden_RD: Tensor
    keep: Any
    """What the graphs read and nobody else may hold: rotation tables."""
    hidden_RD: Tensor | None = None
    forward: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    backward: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)

    def load(self, x_RD: Tensor, rows: Rows, segments: Segments) -> None:
        """Puts a micro-batch where the graphs read it."""
        assert self.rows.mask_N is not None and rows.mask_N is not None
        self.x_RD.detach().copy_(x_RD)
        self.rows.positions_N.copy_(rows.positions_N)
        self.rows.mask_N.copy_(rows.mask_N)
        self.segments.first_B.copy_(segments.first_B)
        self.segments.length_B.copy_(segments.length_B)


class Replayed(torch.autograd.Function):
    """The decoder of a captured bucket."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, batches: MicroBatches, run: Run, rows: Rows, segments: Segments) -> Tensor:
        """Hidden states BF16 [R, D]."""
        ctx.batches, ctx.run = batches, run
        run.load(x_RD, rows, segments)
        run.forward.replay()
        batches.pending = True
        assert run.hidden_RD is not None
        return run.hidden_RD.clone()

    @staticmethod
    def backward(ctx: Any, dhidden_RD: Tensor) -> tuple[Tensor | None, ...]:
        """Of the embedded rows; the masters' are summed in place by the graph."""
        run = ctx.run
        run.dhidden_RD.copy_(dhidden_RD)
        run.backward.replay()
        ctx.batches.pending = False
        assert run.x_RD.grad is not None
        return run.x_RD.grad.clone(), None, None, None, None


class MicroBatches:
    """The captured buckets of one learner."""

    def __init__(self, weights: GradWeights) -> None:
        self.weights, self.masters = weights, list(weights.masters.values())
        self.seen: set[tuple[int, int, int]] = set()
        self.runs: dict[tuple[int, int, int], Run] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.pending = False
        """Whether a captured forward waits for its backward: its activations must not be overwritten."""

    def begin(self) -> None:
        """Before the micro-batches of a step: gradients where the graphs sum them."""
        self.pending = False
        missing = [master for master in self.masters if master.grad is None]
        if missing:
            self.clear()
        for master in missing:
            master.grad = torch.zeros_like(master)

    def zero(self) -> None:
        """Gradients to zero, in place."""
        torch._foreach_zero_([master.grad for master in self.masters if master.grad is not None])

    def clear(self) -> None:
        """Drops the graphs: what they read has moved."""
        self.runs.clear()
        self.seen.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def hidden(self, x_RD: Tensor, packed: Packed, decode: Decode, reach: Callable[[int], Any]) -> Tensor:
        """Hidden states [R, D] of a micro-batch packed to `bucket_rows`, differentiable.

        reach  makes the rotation tables cover so many positions and returns them
        """
        segments = bucket_segments(packed.segments)
        key = (len(x_RD), len(segments.first_B), segments.longest)
        keep = reach(segments.longest)
        if key not in self.runs and key in self.seen and len(self.runs) < MOST and not self.pending:
            self.runs[key] = self._capture(x_RD, packed.rows, segments, decode, keep)
        self.seen.add(key)
        if key in self.runs and not self.pending:
            return Replayed.apply(x_RD, self, self.runs[key], packed.rows, segments)
        return decode(x_RD, packed.rows, segments)

    def _capture(self, x_RD: Tensor, rows: Rows, segments: Segments, decode: Decode, keep: Any) -> Run:
        assert rows.mask_N is not None
        x = x_RD.detach().clone().requires_grad_()
        x.grad = torch.zeros_like(x)
        static = Rows(tokens_N=rows.tokens_N, positions_N=rows.positions_N.clone(), mask_N=rows.mask_N.clone())
        places = Segments(segments.first_B.clone(), segments.length_B.clone(), segments.longest, segments.rectangle)
        run = Run(x, static, places, torch.zeros_like(x_RD), keep)
        stream = torch.cuda.Stream(x.device)
        options: dict[str, Any] = {"pool": self.pool, "stream": stream}
        torch.cuda.synchronize(x.device)
        try:
            with self._leaves():
                with capturing(run.forward, **options):
                    hidden = decode(x, static, places)
                with capturing(run.backward, **options):
                    x.grad.zero_()
                    hidden.backward(run.dhidden_RD)
        except BaseException:
            self.clear()  # a pool whose capture broke off takes no other
            raise
        run.hidden_RD = hidden.detach()
        return run

    @contextmanager
    def _leaves(self) -> Iterator[None]:
        """Other leaves over the masters' storage and gradients while a graph is captured.

        Autograd adds a leaf's gradient up on the stream where the leaf was first used, as long as anything of that use
        is alive: of the masters that is the stream outside, which may not wait for one that is captured.
        """
        masters = self.weights.masters
        leaves = {key: master.detach().requires_grad_(master.requires_grad) for key, master in masters.items()}
        for key, leaf in leaves.items():
            leaf.grad = masters[key].grad
        self.weights.masters = leaves
        try:
            yield
        finally:
            self.weights.masters = masters
