"""What linears give on the way through a forward pass, noted by name, for checks that compare two passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from onegrid.model.decoder import Attend
from onegrid.ops.grouped import Dispatch

Taps = list[tuple[str, Tensor]]
"""Outputs of linears (by storage key) and of attention ("model.layers.3.self_attn"), in forward order."""


@dataclass
class Tapped:
    """Weights of the decoder that note what their linears give.

    change  what becomes of every output before it goes on; None leaves it
    """

    weights: Any
    taps: Taps = field(default_factory=list)
    change: Callable[[Tensor], Tensor] | None = None

    def linear(
        self, keys: tuple[str, ...], x: Any, dispatch: Dispatch | None = None, *, sent: bool = False
    ) -> list[Tensor]:
        """See `model.decoder.Weights`."""
        out = self.weights.linear(keys, x, dispatch, sent=sent)
        if self.change is not None:
            out = [self.change(y) for y in out]
        # Places of experts that nobody owns hold whatever was in memory.
        noted = out if dispatch is None else [dispatch.cleared(y) for y in out]
        self.taps += zip(keys, noted, strict=True)
        return out

    def attend(self, attend: Attend) -> Attend:
        """`attend`, noted and changed alike."""

        def tapped(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(layer, q, k, v)
            if self.change is not None:
                out = self.change(out)
            self.taps.append((f"model.layers.{layer}.self_attn", out))
            return out

        return tapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)
