"""Weights that few rows read from their codes and scales, where that is faster and gives the same bytes.

Kernels read the canonical storage itself: there is no second copy in another layout that could be stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import Quantizer, QuantTensor
from onegrid.model.canonical import Canonical
from onegrid.ops.matmul_choice import SMALLEST, Choice, choose, own_rows
from onegrid.ops.packed_cuda import Packed, covers


class PackedWeights:
    """The packed matmuls of one side, by the keys that one matmul reads.

    held        canonical storage by key; members of a group are moved to lie one below the other
    groups      keys that read the same activations
    activation  quantizer of every key's activations
    decoded     whether decoded weights are at hand; else packed ones are read wherever they have the same bytes
    choices     what was measured, for the record of a run
    """

    def __init__(
        self,
        held: dict[str, Canonical],
        groups: Iterable[tuple[str, ...]],
        activation: Mapping[str, Quantizer | None],
        device: torch.device,
        *,
        decoded: bool = True,
    ) -> None:
        self.choices: list[Choice] = []
        self._packed: dict[tuple[str, ...], Packed] = {}
        self._rows: dict[tuple[str, ...], frozenset[int]] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}
        for keys in each_matmul(held, groups):
            shape = _covered(held, keys, activation, device)
            if shape is None:
                continue
            first, wanted = held[keys[0]], activation[keys[0]]
            assert isinstance(first, QuantTensor) and wanted is not None
            found = choose(shape, first.quantizer.name, wanted.name, device, decoded=decoded)
            self.choices += [choice for choice in found if choice not in self.choices]
            rows = own_rows(found)
            if rows:
                self._rows[keys] = rows
                packed = self._packed[keys] = _together(held, keys, shape)
                start = 0
                for key in keys:
                    end = start + held[key].shape[0]
                    self._parts[key] = {"codes": packed.codes[start:end], "scales": packed.scales[start:end]}
                    start = end

    def of(self, keys: tuple[str, ...], num_rows: int) -> Packed | None:
        """The packed weight of one matmul over `num_rows` rows, or None where decoded weights are to be read."""
        return self._packed[keys] if num_rows in self._rows.get(keys, ()) else None

    def parts(self, key: str) -> dict[str, Tensor]:
        """Codes and scales of one key in the storage that the kernels read; nothing where they read none."""
        return self._parts.get(key, {})

    def check(self) -> None:
        """CapabilityError that names the weights whose scales the kernels do not decode; for after every update.

        Waits for the device.
        """
        spans = {keys: span for keys, packed in self._packed.items() if (span := packed.decodes) is not None}
        if not spans:
            return
        ends = torch.stack([torch.stack(self._packed[keys].scales.aminmax()) for keys in spans]).tolist()
        doubted = {
            key: span
            for (keys, span), (least, most) in zip(spans.items(), ends, strict=True)
            for key in keys
            if least not in span or most not in span
        }
        wrong = {key: byte for key, span in doubted.items() if (byte := self._beyond(key, span)) is not None}
        if wrong:
            first, byte = next(iter(wrong.items()))
            span = doubted[first]
            raise CapabilityError(
                f"packed weights: a block's scale is 2^{byte - 127} in {', '.join(wrong)}; "
                f'2^{span[0] - 127} to 2^{span[-1] - 127} are covered. Set sampler.weights = "decoded"',
                tensors=tuple(wrong),
            )

    def _beyond(self, key: str, span: range) -> int | None:
        """A scale byte outside `span` of a block that is not zero, whose scale would not matter."""
        codes, scales = self._parts[key]["codes"].view(torch.uint8), self._parts[key]["scales"].view(torch.uint8)
        size = 0x7F if codes.shape[-1] == 32 * scales.shape[-1] else 0x77  # of one code in a byte, or of two
        full = ((codes & size) != 0).view(*scales.shape, -1).any(-1)
        outside = scales[((scales < span[0]) | (scales > span[-1])) & full]
        return int(outside[0]) if len(outside) else None


def each_matmul(held: Mapping[str, Canonical], groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The keys that one matmul reads, for all of `held`: those of a group that is there, and every other alone."""
    together = [keys for keys in groups if all(key in held for key in keys)]
    grouped = {key for keys in together for key in keys}
    return [*together, *((key,) for key in held if key not in grouped)]


def _covered(
    held: Mapping[str, Canonical],
    keys: tuple[str, ...],
    activation: Mapping[str, Quantizer | None],
    device: torch.device,
) -> tuple[int, int] | None:
    """(N, K) of the one matmul that reads `keys`, or None where the kernels do not cover it."""
    parts, wanted = [held[key] for key in keys], activation[keys[0]]
    if not all(key.endswith("_proj.weight") and len(held[key].shape) == 2 for key in keys):
        return None
    quantizers = [part.quantizer if isinstance(part, QuantTensor) else None for part in parts]
    first = quantizers[0]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    if (
        first is None
        or wanted is None
        or first.matmul != wanted.matmul
        or any(quantizer is not first for quantizer in quantizers)
        or any(isinstance(part, QuantTensor) and part.axis != -1 for part in parts)
        or any(key.removesuffix("weight") + "bias" in held for key in keys)
        or shape[0] * shape[1] < SMALLEST
        or not covers(first, shape, device)
    ):
        return None
    return shape


def _together(held: dict[str, Canonical], keys: tuple[str, ...], shape: tuple[int, int]) -> Packed:
    """One storage of the codes and scales of `keys`, of which theirs become views."""
    parts = [part for key in keys if isinstance(part := held[key], QuantTensor)]
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    start = 0
    for key, part in zip(keys, parts, strict=True):
        at = slice(start, start + part.shape[0])
        held[key] = replace(part, codes=codes[at], scales=scales[at])
        start = at.stop
    return Packed(codes, scales, parts[0].quantizer, shape)
