"""From a source's weights to those of a plan: carried over where the grid is the same, quantized where it is not.

Carrying over keeps codes: the same format under other names, FP8 blocks with power-of-two scales as MXFP8, the scale of
NVFP4 as divisor or multiplier. Everything else is decoded to BF16 and quantized from there, as learner and sampler do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from onegrid.convert.by_rows import largest, quantize_by_rows, require_finite
from onegrid.convert.layouts import Layout
from onegrid.convert.source import Source
from onegrid.convert.stored import as_mxfp8, parts_on_disk, with_amax
from onegrid.errors import NonFiniteError, WeightsError
from onegrid.formats import QUANTIZERS, Quantizer, QuantTensor
from onegrid.formats.casts import divide
from onegrid.recipe import Plan
from onegrid.recipe.kinds import fused_group


@dataclass
class Converter:
    """Makes the tensors of one weight at a time. `rows` has the layout of every quantized weight."""

    source: Source
    plan: Plan
    rows: dict[str, Layout]
    groups: dict[str, tuple[str, ...]] = field(init=False)
    """Weight -> those that share its amax, itself included."""
    _amax: dict[tuple[str, ...], Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        members: dict[str, list[str]] = {}
        for name, row in self.rows.items():
            planned = self.plan[name]
            if QUANTIZERS[str(planned.sampler_weight)].span == "tensor":
                fused = fused_group(name) if row.one_global else None
                latent = fused if fused and fused.endswith(".fused_qkv_a_proj") else None
                members.setdefault(planned.amax_group or latent or name, []).append(name)
        self.groups = {name: tuple(names) for names in members.values() for name in names}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Key -> tensor of a weight in the target. Raises NonFiniteError for NaN, Inf and scales that overflow."""
        if name not in self.rows:
            stored = self.source.read(name)
            if isinstance(stored, QuantTensor):
                return {name: self.source.values(name)}
            if stored.dtype.is_floating_point and stored.element_size() > 1:
                require_finite(name, stored)
            return {name: stored}
        stem = name.removesuffix(".weight")
        parts = parts_on_disk(self.quantized(name), self.rows[name])
        parts |= self._input_scale(name, self.rows[name])
        return {f"{stem}.{suffix}": part for suffix, part in parts.items()}

    def quantized(self, name: str) -> QuantTensor:
        """The weight in the plan's quantizer."""
        target = QUANTIZERS[str(self.plan[name].sampler_weight)]
        amax = self._group_amax(name, target)
        q = self._carried(name, target)
        if q is not None and q.amax is not None and amax is not None:
            return with_amax(q, amax)
        if q is not None and amax is None:
            return q
        q = quantize_by_rows(self.source.values(name), target, amax)
        if int(q.stats.overflow):
            raise NonFiniteError(
                f"{name} has {int(q.stats.overflow)} scales that {target} cannot decode to finite numbers"
            )
        return q

    def _input_scale(self, name: str, row: Layout) -> dict[str, Tensor]:
        """A static input scale that the source has, in the target's sense; {} leaves the 1.0 that stands there."""
        weight = self.source.weights[name]
        if row.input_scale is None or not weight.inputs:
            return {}
        scale = self.source.read_input_scale(name)
        divides = row.method == "compressed-tensors"
        if (weight.input_sense == "divisor") != divides:
            scale = divide(1.0, scale)
        ours, theirs = (QUANTIZERS[str(n)].has_amax for n in (self.plan[name].sampler_weight, weight.quantizer))
        if ours != theirs:  # FP8 scales are amax / 448, those of NVFP4 amax / 2688
            scale = scale * 6 if ours == divides else divide(scale, torch.full_like(scale, 6.0))
        return {row.input_scale: scale.reshape((1,) if divides else ())}

    def _carried(self, name: str, target: Quantizer) -> QuantTensor | None:
        """The stored codes if they are on the target's grid already."""
        if self.source.weights[name].quantizer is None:
            return None
        stored = self.source.read(name)
        assert isinstance(stored, QuantTensor)
        grid = stored.quantizer.name
        if grid == target.name:
            return stored
        if (grid, target.name) == ("fp8_128x128", "fp8_128x128_fp32"):  # a power of two is an FP32 scale as well
            return replace(stored, quantizer=target)
        if (grid, target.name) == ("fp8_128x128", "mxfp8"):
            return as_mxfp8(stored)
        return None

    def _group_amax(self, name: str, target: Quantizer) -> Tensor | None:
        """The amax a weight gets from its group; None if it has none, or if codes are carried over as they are."""
        group = self.groups.get(name)
        if group is None:
            return None
        if group not in self._amax:
            self._amax[group] = self._largest(group, target)
        return self._amax[group]

    def _largest(self, group: tuple[str, ...], target: Quantizer) -> Tensor | None:
        carried = [self._carried(name, target) for name in group]
        if not target.has_amax and all(q is not None for q in carried):
            scales = torch.stack([q.scales for q in carried if q is not None])
            if bool((scales == scales[0]).all()):
                return None
            carried = [None] * len(group)
        each = [
            largest(self.source.values(name)) if q is None or q.amax is None else q.amax
            for name, q in zip(group, carried, strict=True)
        ]
        return torch.stack(each).amax()


def check_shape(name: str, shape: tuple[int, ...], row: Layout) -> None:
    """WeightsError for what a layout cannot hold: two codes in a byte need an even K."""
    if row.packed and shape[-1] % 2:
        raise WeightsError(f"{name} has {shape[-1]} columns; two 4-bit codes share a byte, so it must be even")
