"""The logits that the engine samples from, kept as its model computes them.

vLLM tells log-probabilities of chosen tokens only at a price: for a whole vocabulary its GPU runner compiles a kernel
that is unrolled over every entry, which takes minutes. Both of its runners call the model's `compute_logits` outside of
captured graphs and of compiled code, so what passes there can be kept, whatever the forward is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class KeptLogits:
    """Keeps what the last call of `model.compute_logits` gave, from its making until `release`.

    Shadows the method on this one instance; the class, and every other model, stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.last = model, None
        compute: Any = model.compute_logits

        def compute_logits(*arguments: Any, **named: Any) -> Any:
            logits = compute(*arguments, **named)
            self.last = None if logits is None else logits.detach().clone()  # samplers write into what they are given
            return logits

        model.compute_logits = compute_logits  # type: ignore[assignment]

    last: Tensor | None
    """[rows, V] as the model gives them, V the vocabulary without padding; None before the first call."""

    def release(self) -> Tensor | None:
        """Puts the method back. Returns `last`."""
        self.model.__dict__.pop("compute_logits", None)
        return self.last
