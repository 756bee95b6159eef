"""From a tensor to codes and scales, and straight to the decoded values that a matmul reads.

Both ways share `_scaled`: block amax, scale rule, scaled values. `quantize` turns the rounded values into codes;
`quantize_decode` multiplies them by the block scale at once and is byte-equal to `decode(quantize(...))`.

Orientation. Grids and 8-bit codes keep the M x K orientation of the input for either axis. 4-bit codes are packed
along the contraction axis, which is then the last one in storage: [M, ceil(K/2)] for axis -1, [K, ceil(M/2)] for
axis -2. Leading axes (experts) are independent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from onegrid.errors import FormatError
from onegrid.formats import foreign, scales
from onegrid.formats.casts import FLT_MAX, divide, encode_exact, round_magnitude_
from onegrid.formats.four_over_six import four_over_six
from onegrid.formats.layouts import pack
from onegrid.formats.rounding import round_stochastic, round_ties
from onegrid.formats.scales import Scaling, global_encode
from onegrid.formats.table import Quantizer

RULES = scales.RULES | foreign.RULES


@dataclass(frozen=True, slots=True)
class Stats:
    """What a quantizer saw that a caller may want to refuse. Tensors of shape (), int64, so that nothing waits."""

    nonfinite: Tensor
    """NaN and Inf in the input."""
    saturated: Tensor
    """Elements beyond the format's range after scaling (more than rounding), or Inf."""
    overflow: Tensor
    """Blocks whose largest code would decode to Inf, or global amax values outside what the rule can decode."""


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Codes and scales of one logical tensor of shape [..., M, K]."""

    codes: Tensor
    """uint8; see this module's docstring for the orientation."""
    scales: Tensor
    """[..., ceil(M/h), ceil(K/w)]: uint8 for E8M0 and E4M3, FP32 decode multipliers else; [...] for one per tensor."""
    amax: Tensor | None
    """FP32 global amax A: [...] per tensor, [..., M] per row, [..., K] per column (axis -2); else None."""
    factor: Tensor | None
    """RN(1/S_enc) for export only; decoding uses `amax`."""
    shape: tuple[int, ...]
    quantizer: Quantizer
    axis: int
    """Contraction axis, -1 or -2."""
    stats: Stats

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and amax."""
        parts = (self.codes, self.scales, self.amax)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same bytes on another device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            amax=None if self.amax is None else self.amax.to(device),
            factor=None if self.factor is None else self.factor.to(device),
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a matmul needs of a quantized operand."""

    values: Tensor
    """FP32, shape of the input: element values times block scales, as `decode` gives."""
    amax: Tensor | None
    scales: Tensor
    stats: Stats | None


def quantize(
    x: Tensor, quantizer: Quantizer, axis: int = -1, amax: Tensor | None = None, random_bits: Tensor | None = None
) -> QuantTensor:
    """Codes and scales of `x`.

    x            [..., M, K], FP32, BF16 or FP16, any strides. Empty axes are fine. NaN gets the NaN code (E2M1: +6) and
                 does not enter the scale; Inf saturates; both are counted. A zero block gives zero codes.
    axis         the contraction axis, -1 or -2; blocks lie along it.
    amax         global amax from outside, for shards of one tensor; shape as `QuantTensor.amax`.
    random_bits  uint8 of x's shape for stochastic rounding (E2M1 only).
    Raises FormatError for other dtypes, axes and shapes. Source: the rule that `quantizer.source` names.
    """
    state = _scaled(x, quantizer, axis, amax)
    stats = _stats(state, quantizer)
    values = _unblock(_signed(_rounded(state, quantizer, axis, random_bits), state, quantizer), state.shape)
    codes = encode_exact(values, quantizer.fmt)
    if quantizer.fmt.bits == 4:
        codes = pack(codes if axis == -1 else codes.transpose(-1, -2))
    factor = None
    if quantizer.has_amax and state.amax is not None:
        factor = divide(1.0, global_encode(state.amax, quantizer))
    amax_out = state.amax if quantizer.has_amax else None
    return QuantTensor(
        codes.contiguous(), _stored(state, quantizer), amax_out, factor, tuple(x.shape), quantizer, axis, stats
    )


def quantize_decode(
    x: Tensor,
    quantizer: Quantizer,
    axis: int = -1,
    amax: Tensor | None = None,
    *,
    random_bits: Tensor | None = None,
    stats: bool = False,
) -> Decoded:
    """The values that codes and scales of `x` stand for, without making the codes. Arguments as in `quantize`.

    stats  also count non-finite and saturated elements (some passes over memory more).
    """
    state = _scaled(x, quantizer, axis, amax)
    counted = _stats(state, quantizer) if stats else None
    values = _signed(
        _rounded(state, quantizer, axis, random_bits).mul_(_spread(state.scaling.decode)), state, quantizer
    )
    return Decoded(
        _unblock(values, state.shape),
        state.amax if quantizer.has_amax else None,
        _stored(state, quantizer),
        counted,
    )


@dataclass(frozen=True, slots=True)
class _State:
    """Blocks are [..., Mb, h, Kb, w], the grid is [..., Mb, Kb]."""

    signs: Tensor
    """FP32 blocks whose signs the result gets."""
    magnitude: Tensor
    """FP32 blocks |x| times the encode multiplier; scratch that rounding overwrites."""
    inputs: Tensor
    """The input in blocks, FP32."""
    amax_G: Tensor
    scaling: Scaling
    amax: Tensor | None
    may_have_nan: bool
    shape: tuple[int, ...]


def _scaled(x: Tensor, quantizer: Quantizer, axis: int, amax: Tensor | None) -> _State:
    _check(x, quantizer, axis, amax)
    inputs = _blocked(x.float(), quantizer, axis)
    magnitude = inputs.abs()
    raw_amax_G = _block_amax(magnitude)
    may_have_nan = _worth_a_pass(raw_amax_G.isnan())
    amax_G = raw_amax_G
    if may_have_nan and quantizer.nan != "block":
        amax_G = _block_amax(magnitude.nan_to_num(nan=0.0, posinf=torch.inf))
    global_amax, global_amax_G = _global_amax(amax_G, quantizer, axis, amax)
    block_amax_G = amax_G
    if amax is not None and not quantizer.has_amax:
        assert global_amax_G is not None
        block_amax_G = global_amax_G
    if quantizer.four_over_six:
        assert global_amax_G is not None
        scaling = four_over_six(inputs, amax_G, global_amax_G, quantizer)
    else:
        scaling = RULES[quantizer.rule](block_amax_G, global_amax_G, quantizer, x.dtype)
    encode = _spread(scaling.encode)
    magnitude = divide(magnitude, encode) if scaling.divides else magnitude.mul_(encode)
    signs = inputs
    if quantizer.nan == "max" or (may_have_nan and quantizer.fmt.nan_code is None):
        # "max" always: such rules make a NaN themselves, from Inf times 0
        signs = torch.where(magnitude.isnan(), 0.0, inputs)
        magnitude = magnitude.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if quantizer.zero_sign == "positive":
        signs = torch.where(magnitude == 0, 0.0, signs)
    return _State(signs, magnitude, inputs, raw_amax_G, scaling, global_amax, may_have_nan, tuple(x.shape))


def _worth_a_pass(mask_G: Tensor) -> bool:
    """Whether work that only some values need must be done. Looks where looking is free; compiled or on a GPU: yes."""
    if torch.compiler.is_compiling() or mask_G.device.type != "cpu":
        return True
    return bool(mask_G.any())


def _check(x: Tensor, quantizer: Quantizer, axis: int, amax: Tensor | None) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise FormatError(f"{quantizer}: input dtype {x.dtype}; allowed are float32, bfloat16 and float16")
    if x.dim() < 2:
        raise FormatError(f"{quantizer}: input of shape {tuple(x.shape)}; at least two axes [..., M, K] are needed")
    if axis not in (-1, -2):
        raise FormatError(f"{quantizer}: axis {axis}; the contraction axis is -1 or -2")
    if amax is None:
        return
    if not quantizer.takes_amax:
        raise FormatError(f"{quantizer} has no scale wider than a block, so it takes no amax from outside")
    wanted = _amax_shape(x.shape, quantizer, axis)
    if tuple(amax.shape) != wanted:
        raise FormatError(f"{quantizer}: amax of shape {tuple(amax.shape)} for input {tuple(x.shape)}; needed {wanted}")


def _amax_shape(shape: torch.Size, quantizer: Quantizer, axis: int) -> tuple[int, ...]:
    lead = tuple(shape[:-2])
    return lead if quantizer.span == "tensor" else (*lead, shape[-2] if axis == -1 else shape[-1])


def _blocked(x: Tensor, quantizer: Quantizer, axis: int) -> Tensor:
    """[..., M, K] as [..., Mb, h, Kb, w]; the edge is padded with zeros, which change no amax."""
    across, along = quantizer.block if axis == -1 else quantizer.block[::-1]
    rows, columns = x.shape[-2:]
    height, width = across or max(rows, 1), along or max(columns, 1)
    over_rows = -rows % height if across else height - rows
    over_columns = -columns % width if along else width - columns
    if over_rows or over_columns:
        x = F.pad(x, (0, over_columns, 0, over_rows))
    return x.reshape(*x.shape[:-2], x.shape[-2] // height, height, x.shape[-1] // width, width)


def _unblock(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    full = blocks.reshape(*shape[:-2], blocks.shape[-4] * blocks.shape[-3], blocks.shape[-2] * blocks.shape[-1])
    return full if tuple(full.shape) == shape else full[..., : shape[-2], : shape[-1]].contiguous()


def _block_amax(magnitude: Tensor) -> Tensor:
    """[..., Mb, Kb]: the largest of every block; NaN where a block has one."""
    grid = (*magnitude.shape[:-3], magnitude.shape[-2])
    if magnitude.numel() == 0:
        return magnitude.new_zeros(grid)
    dims = [dim for dim in (-3, -1) if magnitude.shape[dim] > 1]
    return (magnitude.amax(dims) if dims else magnitude).reshape(grid)


def _global_amax(
    amax_G: Tensor, quantizer: Quantizer, axis: int, amax: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The global amax in its own shape, and broadcastable to the grid."""
    if quantizer.span == "none":
        return None, None
    along = (-1,) if axis == -1 else (-2,)
    dims = (-2, -1) if quantizer.span == "tensor" else along
    if amax is None:
        empty = any(amax_G.shape[dim] == 0 for dim in dims)
        kept = [size for dim, size in enumerate(amax_G.shape) if dim - amax_G.dim() not in dims]
        amax = amax_G.new_zeros(kept) if empty else amax_G.amax(dims)
    amax = amax.float()
    wide = amax[..., None, None] if quantizer.span == "tensor" else amax.unsqueeze(along[0])
    return amax, wide


def _spread(grid: Tensor) -> Tensor:
    return grid[..., :, None, :, None]


def _stored(state: _State, quantizer: Quantizer) -> Tensor:
    scales = state.scaling.scales
    return scales[..., 0, 0] if quantizer.block == (None, None) else scales


def _rounded(state: _State, quantizer: Quantizer, axis: int, random_bits: Tensor | None) -> Tensor:
    if random_bits is not None:
        if quantizer.fmt.bits != 4 or tuple(random_bits.shape) != state.shape:
            raise FormatError(
                f"{quantizer}: random bits of shape {tuple(random_bits.shape)} for input {state.shape}; "
                "stochastic rounding is defined for E2M1 and takes one byte per element"
            )
        return round_stochastic(state.magnitude, _blocked(random_bits.float(), quantizer, axis))
    if quantizer.ties != "even":
        return round_ties(state.magnitude, quantizer.ties)
    return round_magnitude_(state.magnitude, quantizer.fmt)


def _signed(magnitude: Tensor, state: _State, quantizer: Quantizer) -> Tensor:
    """The state's signs on rounded (and perhaps decoded) magnitudes."""
    if quantizer.zero_sign == "never":
        return torch.where(magnitude == 0, 0.0, magnitude.copysign(state.signs))
    if state.may_have_nan:  # one NaN for all, so that bytes do not depend on the device
        magnitude = magnitude.nan_to_num_(nan=torch.nan, posinf=torch.inf)
        return torch.where(magnitude.isnan(), magnitude, magnitude.copysign(state.signs))
    return magnitude.copysign_(state.signs)


def _stats(state: _State, quantizer: Quantizer) -> Stats:
    """Counts, taken before rounding overwrites the scaled values."""
    device = state.magnitude.device
    nonfinite = saturated = torch.zeros((), dtype=torch.int64, device=device)
    limit = quantizer.fmt.saturates_at
    unusual = ~state.amax_G.isfinite()
    if _worth_a_pass(unusual):
        nonfinite = (~state.inputs.isfinite()).sum()
    if _worth_a_pass(unusual | (_block_amax(state.magnitude) >= limit)):
        saturated = ((state.magnitude >= limit) & ~state.inputs.isnan()).sum()
    if quantizer.has_amax:
        assert state.amax is not None
        decodable = (state.amax >= 6.0 * quantizer.scale_max / FLT_MAX) & (state.amax <= FLT_MAX / quantizer.scale_max)
        overflow = ~decodable & (state.amax != 0)
    else:
        overflow = (state.scaling.decode * quantizer.fmt.max).isinf()
    return Stats(nonfinite, saturated, overflow.sum())
