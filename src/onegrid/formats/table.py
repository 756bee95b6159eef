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
    zero_sign: Literal["keep", "positive", "never"] = "keep"
    """"positive": a scaled value of exactly -0 becomes +0, and a negative underflow keeps its sign. "never": no -0."""
    nan: Literal["element", "block", "max"] = "element"
    """"element": a NaN gets the NaN code and the scale comes from the rest; "max": it gets the largest value instead.
    "block": it spoils its whole block."""
    ties: Literal["even", "away", "zero"] = "even"
    """Which neighbour a value halfway between two gets; other than "even" for E2M1 only."""
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
        """How products are formed: on decoded values, block values and two amax, two scales, or per 128 of K."""
        if self.scale == "e4m3":
            return "nvfp4"
        if self.span != "none":
            return "scaled"
        return "decoded" if self.scale == "e8m0" or self.pow2 else "block_fp32"

    def __str__(self) -> str:
        return self.name


def _row(name: str, fmt: Format, block: tuple, scale: str, rule: str, **options) -> tuple[str, Quantizer]:
    return name, Quantizer(name=name, fmt=fmt, block=block, scale=scale, rule=rule, **options)  # type: ignore[arg-type]


def _engine_rows() -> dict[str, Quantizer]:
    """Rules of other engines, for reproducing a mismatch with them. `foreign.py` has the functions."""
    mxfp8, mxfp4 = (E4M3, (1, 32), "e8m0"), (E2M1, (1, 32), "e8m0")
    nvfp4, tile = (E2M1, (1, 16), "e4m3"), (E4M3, (128, 128), "fp32")
    torchao, vllm, flashinfer = "torchao 0.18", "vLLM 0.33", "FlashInfer 0.7.4"
    tensors = "compressed-tensors 0.20"
    return dict(
        (
            _row("mxfp8_floor", *mxfp8, "mx_floor", nan="block", source=f"{torchao} FLOOR; OCP MX v1.0"),
            _row("mxfp8_ceil", *mxfp8, "mx_ceil", nan="block", source=f"{torchao} CEIL"),
            _row("mxfp8_even", *mxfp8, "mx_even", nan="block", source=f"{torchao} EVEN"),
            _row("mxfp8_rceil", *mxfp8, "mx_rceil", nan="block", source=f"{torchao} RCEIL"),
            _row("mxfp8_vllm", *mxfp8, "mx_divided", nan="block", source=f"{vllm} without FlashInfer"),
            _row("mxfp8_modelopt", *mxfp8, "mx_divided", nan="block", source="modelopt 0.47"),
            _row("mxfp8_sglang", *mxfp8, "mx_bits", nan="block", source="SGLang 0.5.23 weights"),
            _row("mxfp8_flashinfer", *mxfp8, "mx_flashinfer", nan="max", source=f"{flashinfer} default kernels"),
            _row("mxfp8_deepgemm", *mxfp8, "mx_deepgemm", source="DeepGEMM per_token_cast"),
            _row("mxfp8_compressed_tensors", *mxfp8, "mx_even_fp4", nan="block", source=tensors),
            _row("mxfp4_floor", *mxfp4, "mx_floor", nan="block", source=f"{torchao} FLOOR; OCP MX v1.0"),
            _row("mxfp4_rceil", *mxfp4, "mx_rceil", nan="block", source=f"{torchao} RCEIL"),
            _row("mxfp4_flashinfer", *mxfp4, "mx_flashinfer", nan="max", source=f"{flashinfer} default kernel"),
            _row("mxfp4_modelopt", *mxfp4, "mx_divided", ties="zero", source="modelopt 0.47, +0 kept as code 0"),
            _row("mxfp4_triton", *mxfp4, "mx_bits", ties="away", source="triton_kernels (SGLang, vLLM gpt-oss)"),
            _row("mxfp4_compressed_tensors", *mxfp4, "mx_even_fp4", nan="block", source=tensors),
            _row("mxfp4_deepgemm", *mxfp4, "mx_deepgemm", ties="zero", zero_sign="never", source="DeepGEMM"),
            _row("nvfp4_flashinfer", *nvfp4, "nvfp4_fast", span="tensor", source=f"{flashinfer} default (fast)"),
            _row("nvfp4_flashinfer_exact", *nvfp4, "nvfp4_exact", span="tensor", source=f"{flashinfer}, fast math off"),
            _row(
                "nvfp4_flashinfer_row", *nvfp4, "nvfp4_exact_row", span="row", source=f"{flashinfer} per token, exact"
            ),
            _row("nvfp4_vllm", *nvfp4, "nvfp4_fast", span="tensor", source=f"{vllm} scaled_fp4_quant"),
            _row(
                "nvfp4_vllm_ref",
                *nvfp4,
                "nvfp4_ref",
                span="tensor",
                zero_sign="positive",
                source=f"{vllm} ref_nvfp4_quant",
            ),
            _row(
                "nvfp4_modelopt", *nvfp4, "nvfp4_modelopt", span="tensor", zero_sign="positive", source="modelopt 0.47"
            ),
            _row("nvfp4_torchao", *nvfp4, "nvfp4_torchao", span="tensor", source=torchao),
            _row("nvfp4_compressed_tensors", *nvfp4, "nvfp4_compressed_tensors", span="tensor", source=tensors),
            _row("fp8_1x128_deepgemm", E4M3, (1, 128), "fp32", "fp8_deepgemm", pow2=True, source="DeepGEMM, vLLM"),
            _row(
                "fp8_128x128_deepgemm", *tile, "fp8_deepgemm", pow2=True, source="DeepGEMM, vLLM per_block_cast_to_fp8"
            ),
            _row("fp8_128x128_fp32_deepgemm", *tile, "fp8_deepgemm", source="DeepGEMM, vLLM per_block_cast_to_fp8"),
            _row("fp8_128x128_fp32_nemo_rl", *tile, "fp8_nemo_rl", source="NeMo-RL cast_tensor_to_fp8_blockwise"),
            _row(
                "fp8_tensor_divided",
                E4M3,
                (None, None),
                "fp32",
                "fp8_divided",
                span="tensor",
                source="amax / 448 first",
            ),
            _row("fp8_row_divided", E4M3, (1, None), "fp32", "fp8_divided", span="row", source="amax / 448 first"),
        )
    )


QUANTIZERS: dict[str, Quantizer] = dict(
    (
        _row("mxfp8", E4M3, (1, 32), "e8m0", "mx"),
        _row("mxfp8_e5m2", E5M2, (1, 32), "e8m0", "mx"),
        _row("mxfp8_2d", E4M3, (32, 32), "e8m0", "mx"),
        _row("mxfp4", E2M1, (1, 32), "e8m0", "mx", source="NVIDIA round-up rule (FlashInfer mxfp4.quant)"),
        _row("nvfp4", E2M1, (1, 16), "e4m3", "nvfp4", span="tensor"),
        _row("nvfp4_row", E2M1, (1, 16), "e4m3", "nvfp4", span="row"),
        _row("nvfp4_2d", E2M1, (16, 16), "e4m3", "nvfp4", span="tensor"),
        _row("nvfp4_4over6", E2M1, (1, 16), "e4m3", "nvfp4", span="tensor", scale_max=256.0, four_over_six="mae"),
        _row("nvfp4_row_4over6", E2M1, (1, 16), "e4m3", "nvfp4", span="row", scale_max=256.0, four_over_six="mae"),
        _row("nvfp4_2d_4over6", E2M1, (16, 16), "e4m3", "nvfp4", span="tensor", scale_max=256.0, four_over_six="mae"),
        _row("nvfp4_4over6_448_mse", E2M1, (1, 16), "e4m3", "nvfp4", span="tensor", four_over_six="mse"),
        _row("fp8_tensor", E4M3, (None, None), "fp32", "fp8", span="tensor"),
        _row("fp8_tensor_pow2", E4M3, (None, None), "fp32", "fp8", span="tensor", pow2=True),
        _row("fp8_tensor_e5m2", E5M2, (None, None), "fp32", "fp8", span="tensor"),
        _row("fp8_row", E4M3, (1, None), "fp32", "fp8", span="row"),
        _row("fp8_row_pow2", E4M3, (1, None), "fp32", "fp8", span="row", pow2=True),
        _row("fp8_1x128", E4M3, (1, 128), "fp32", "fp8_block", pow2=True),
        _row("fp8_128x128", E4M3, (128, 128), "fp32", "fp8_block", pow2=True),
        _row("fp8_1x128_fp32", E4M3, (1, 128), "fp32", "fp8_block"),
        _row("fp8_128x128_fp32", E4M3, (128, 128), "fp32", "fp8_block"),
        *_engine_rows().items(),
    )
)
"""Every quantizer by name. The first twenty are the project's own rules; the rest are those of other engines."""
