"""Which linears in BF16 take our matmul where rows are few: those where it has the library's bytes in less time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from onegrid.formats import Quantizer
from onegrid.model.canonical import Canonical
from onegrid.model.packed import each_matmul
from onegrid.ops.few_cuda import covers
from onegrid.ops.matmul_choice import SMALLEST, Choice, choose_few, own_rows


class FewRows:
    """The choice for one side, by the keys that one matmul reads.

    held        canonical storage by key
    groups      keys that read the same activations
    activation  quantizer of every key's activations
    choices     what was measured, for the record of a run
    """

    def __init__(
        self,
        held: Mapping[str, Canonical],
        groups: Iterable[tuple[str, ...]],
        activation: Mapping[str, Quantizer | None],
        device: torch.device,
    ) -> None:
        self.choices: list[Choice] = []
        self._rows: dict[tuple[str, ...], frozenset[int]] = {}
        for keys in each_matmul(held, groups):
            shape = _covered(held, keys, activation, device)
            if shape is not None:
                found = choose_few(shape, device)
                self.choices += [choice for choice in found if choice not in self.choices]
                self._rows[keys] = own_rows(found)

    def takes(self, keys: tuple[str, ...], num_rows: int) -> bool:
        """Whether the matmul of `keys` over `num_rows` rows is ours."""
        return num_rows in self._rows.get(keys, ())


def _covered(
    held: Mapping[str, Canonical],
    keys: tuple[str, ...],
    activation: Mapping[str, Quantizer | None],
    device: torch.device,
) -> tuple[int, int] | None:
    """(N, K) of the one matmul that reads `keys`, or None where ours does not cover it."""
    parts = [held[key] for key in keys]
    if (
        not all(key.endswith("_proj.weight") and activation[key] is None for key in keys)
        or not all(isinstance(part, Tensor) and part.dim() == 2 for part in parts)
        or any(key.removesuffix("weight") + "bias" in held for key in keys)
    ):
        return None
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return shape if shape[0] * shape[1] >= SMALLEST and covers(shape, device) else None
