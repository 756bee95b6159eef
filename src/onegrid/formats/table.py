"""The table of quantizers: element format, block, scale, rule. A new one is a row here plus its bytes in the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onegrid.formats.casts import E2M1, E4M3, E5M2, Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """How a tensor becomes codes and scales. Use `dataclasses.replace` for one with another option."""

    name: str
    fmt: Format
    """Element format."""
    block: tuple[int | None, int | None]
    """Elements that share a scale: (across the contraction axis, along it). None is the whole extent."""
    scale: Literal["e8m0", "e4m3", "fp32"]
    """How a block scale is stored: power-of-two byte, E4M3 byte or FP32 decode multiplier."""
    rule: str
    """Name of the function in `scales.RULES` that makes the scale."""
    span: Literal["none", "tensor", "row"] = "none"
    """What the global amax covers, where the format has one."""
    zero_sign: Literal["keep", "positive"] = "keep"
    """"positive": a scaled value of exactly -0 becomes +0. A negative underflow keeps its sign either way."""
    nan: Literal["element", "block"] = "element"
    """"element": a NaN gets the NaN code and the scale comes from the rest. "block": it spoils its whole block."""
    pow2: bool = False
    """FP32 scales are rounded to powers of two."""
    scale_max: float = 448.0
    """Largest E4M3 block scale that the global scale aims at (256 leaves headroom for 4-over-6)."""
    four_over_six: Literal["mae", "mse"] | None = None
    """Pick per block between scaling to 4 and to 6, by mean absolute or mean squared error."""
    source: str = "Transformer Engine 2.20"
    """Where the rule comes from."""

    @property
    def bits_per_element(self) -> float:
        """Code bits plus the block's share of scale bits (global and per-row numbers left out)."""
        across, along = self.block
        if across is None or along is None:
            return float(self.fmt.bits)
        return self.fmt.bits + (32 if self.scale == "fp32" else 8) / (across * along)

    @property
    def is_per_token(self) -> bool:
        """Whether a row's codes and scales depend on that row only, when quantized along the last axis."""
        return self.block[0] == 1 and self.span != "tensor"

    @property
    def has_amax(self) -> bool:
        """Whether the format stores a global amax beside block scales."""
        return self.scale == "e4m3"

    @property
    def takes_amax(self) -> bool:
        """Whether `quantize` accepts an amax from outside: one scale covers more than a shard may hold."""
        return self.span != "none"

    @property
    def matmul(self) -> Literal["decoded", "nvfp4", "scaled", "block_fp32"]:
        """How products are formed: on decoded values, on block values with two amax, with two scales, or per 128 of K."""
        if self.scale == "e4m3":
            return "nvfp4"
        if self.span != "none":
            return "scaled"
        return "decoded" if self.scale == "e8m0" or self.pow2 else "block_fp32"

    def __str__(self) -> str:
        return self.name


def _rows() -> list[Quantizer]:
    rows = []

    def add(name: str, fmt: Format, block: tuple, scale: str, rule: str, **options) -> None:
        rows.append(Quantizer(name=name, fmt=fmt, block=block, scale=scale, rule=rule, **options))  # type: ignore[arg-type]

    add("mxfp8", E4M3, (1, 32), "e8m0", "mx")
    add("mxfp8_e5m2", E5M2, (1, 32), "e8m0", "mx")
    add("mxfp8_2d", E4M3, (32, 32), "e8m0", "mx")
    add("mxfp4", E2M1, (1, 32), "e8m0", "mx", source="NVIDIA round-up rule (FlashInfer mxfp4.quant)")
    add("nvfp4", E2M1, (1, 16), "e4m3", "nvfp4", span="tensor")
    add("nvfp4_row", E2M1, (1, 16), "e4m3", "nvfp4", span="row")
    add("nvfp4_2d", E2M1, (16, 16), "e4m3", "nvfp4", span="tensor")
    add("fp8_tensor", E4M3, (None, None), "fp32", "fp8", span="tensor")
    add("fp8_tensor_pow2", E4M3, (None, None), "fp32", "fp8", span="tensor", pow2=True)
    add("fp8_tensor_e5m2", E5M2, (None, None), "fp32", "fp8", span="tensor")
    add("fp8_row", E4M3, (1, None), "fp32", "fp8", span="row")
    add("fp8_row_pow2", E4M3, (1, None), "fp32", "fp8", span="row", pow2=True)
    add("fp8_1x128", E4M3, (1, 128), "fp32", "fp8_block", pow2=True)
    add("fp8_128x128", E4M3, (128, 128), "fp32", "fp8_block", pow2=True)
    add("fp8_1x128_fp32", E4M3, (1, 128), "fp32", "fp8_block")
    add("fp8_128x128_fp32", E4M3, (128, 128), "fp32", "fp8_block")
    return rows


QUANTIZERS: dict[str, Quantizer] = {row.name: row for row in _rows()}
