"""Kernels of low-bit formats keep their promise: the bytes of the definition. All of this needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onegrid.errors import CapabilityError, FormatError
from onegrid.formats import QUANTIZERS, quantize, quantize_decode
from onegrid.ops import chains, producers, quantize_cuda
from onegrid.ops.arranged import arranged
from onegrid.ops.linear import matmul
from onegrid.ops.operand import operand, operand_of
from tests.bytes import assert_same_bytes

ACTIVATIONS = ["mxfp8", "mxfp4", "nvfp4_row", "fp8_1x128"]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """BF16 normal numbers, the same everywhere."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda", torch.bfloat16)


def hard(rows: int, width: int = 1024) -> Tensor:
    """BF16 rows with everything that a quantizer may meet, the rest normal numbers."""
    x = draw(rows, width, seed=rows, scale=3.0)
    x[0, :64], x[1, 5], x[1, 40], x[2, 7] = 0.0, torch.inf, -torch.inf, -0.0
    x[3] = torch.arange(width, device="cuda").to(torch.int16).view(torch.bfloat16)  # zero and subnormal numbers
    x[4], x[5] = x[4] * 2.0**60, x[5] * 2.0**-100
    x[6, 3], x[6, 64:128], x[7, 9] = torch.nan, torch.nan, -torch.nan
    x[8] = 3.3e38
    x[9] = 0
    x[10] = torch.tensor([448, 464, 1000, 5, 3.5, 2.5, 0.25, 0.75], device="cuda").repeat(width // 8)
    for row, block in zip(range(11, 16), range(0, 1 << 16, 1 << 13), strict=False):
        x[row] = (torch.arange(width, device="cuda") + block).to(torch.int16).view(torch.bfloat16)
    return x


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantization_along_rows_has_the_bytes_of_the_definition(name, gpu):
    quantizer = QUANTIZERS[name]
    for x in (hard(16), hard(64), hard(32, 12288), hard(4096), draw(33, 2048)):
        assert quantize_cuda.covers(x, quantizer)
        values, amax, ordered = quantize_cuda.quantize_decode(x, quantizer)
        assert (ordered is not None) == (len(x) in (16, 32, 64))
        if ordered is not None:
            assert_same_bytes(ordered, arranged(values))
        want = quantize_decode(x, quantizer)
        assert_same_bytes(values, want.values.to(torch.bfloat16), f"{tuple(x.shape)}")
        if want.amax is not None:
            assert_same_bytes(amax, want.amax)
    wide = draw(64, 4096)
    part = wide[5:40, 1024:2048]
    assert_same_bytes(quantize_cuda.quantize_decode(part, quantizer)[0], operand(part.clone(), quantizer).values)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "fp8_1x128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bf16_number_is_quantized_as_defined(name, dtype, gpu):
    every = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for x in (every.view(512, 128), every.view(128, 512).mT.contiguous()):
        for axis in (-1, -2):
            found = operand(x.to(dtype), QUANTIZERS[name], axis=axis).values
            want = quantize_decode(x.to(dtype), QUANTIZERS[name], axis).values.to(torch.bfloat16)
            assert_same_bytes(found, want if axis == -1 else want.mT, f"axis {axis}")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "fp8_1x128"])
def test_quantization_along_columns_has_the_bytes_of_the_definition(name, gpu):
    from onegrid.ops import quantize_triton

    quantizer = QUANTIZERS[name]
    for x in (hard(128), hard(256).mT.contiguous(), hard(4096)):
        assert quantize_triton.covers_columns(x, quantizer)
        found = quantize_triton.columns(x, quantizer)
        assert_same_bytes(found, quantize_decode(x, quantizer, -2).values.to(torch.bfloat16), f"{tuple(x.shape)}")
    assert not quantize_triton.covers_columns(draw(48 + 3, 64), quantizer)  # a block that is not whole


@pytest.mark.parametrize(("name", "axis"), [("mxfp8_2d", -1), ("mxfp8_2d", -2), ("nvfp4_row", -2)])
def test_compiled_quantization_has_the_bytes_of_the_definition(name, axis, gpu):
    from onegrid.ops.quantize_compiled import compiled_decode, worth_compiling

    for rows in (48, 4096):
        x = hard(rows)
        covered = rows % 32 == 0 or name == "nvfp4_row"
        assert worth_compiling(x, QUANTIZERS[name], axis) == covered
        if covered:
            values, amax = compiled_decode(x, QUANTIZERS[name], axis)
            want = quantize_decode(x, QUANTIZERS[name], axis)
            assert_same_bytes(values, want.values.to(torch.bfloat16), f"{rows} rows")
            if want.amax is not None:
                assert_same_bytes(amax, want.amax)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [512, 1536, 4096, 12288])
def test_producers_have_the_bytes_of_chain_and_quantizer(name, width, gpu):
    quantizer = QUANTIZERS[name]
    assert producers.fuses(quantizer, width)
    for rows in (1, 16, 33, 300):
        x, y, w = draw(rows, width), draw(rows, width, seed=1), draw(width, seed=2)
        x[0, 3] = torch.inf
        total, a = producers.triton_residual_norm(x, y, w, 1e-6, quantizer)
        want_total, h = chains.triton_residual_norm(x, y, w, 1e-6)
        assert_same_bytes(total, want_total)
        joined = draw(rows, 2 * width, seed=3, scale=4.0)
        gate, up = joined.split(width, dim=-1)
        b = producers.triton_gated(gate, up, quantizer)
        for have, want in ((a, operand(h, quantizer)), (b, producers.gated(gate, up, quantizer))):
            assert have.kind == want.kind
            assert_same_bytes(have.values, want.values, f"{rows} rows")
            assert (have.arranged is not None) == (rows == 16)
            if have.arranged is not None:
                assert_same_bytes(have.arranged, arranged(have.values))
            assert (have.row is None) == (want.row is None)
            if have.row is not None:
                assert_same_bytes(have.row, want.row)


@pytest.mark.parametrize(("name", "activation"), [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4_row")])
@pytest.mark.parametrize(
    "shape", [(16, 512), (112, 512), (6144, 4096), (4096, 12288), (24576, 1024), (36864, 1536)], ids=str
)
def test_a_matmul_of_packed_weights_has_the_bytes_of_the_decoded_one(name, activation, shape, gpu):
    from onegrid.ops.packed_cuda import Packed, covers, packed_matmul

    weight = quantize(draw(*shape, seed=1, scale=0.02), QUANTIZERS[name])
    weight.codes[0] = torch.randint(0, 126 if name == "mxfp8" else 256, weight.codes[0].shape, device="cuda")
    assert covers(QUANTIZERS[name], shape, gpu)
    packed, decoded = Packed(weight.codes, weight.scales, weight.quantizer, shape), operand_of(weight)
    for rows in (16, 32, 48, 64):
        a = operand(draw(rows, shape[1], seed=rows), QUANTIZERS[activation])
        row = None if decoded.row is None else decoded.row.contiguous()
        assert a.arranged is not None
        for one in (a, replace(a, arranged=None)):
            assert_same_bytes(packed_matmul(one, packed, row), matmul(a, decoded), f"{rows} rows")


def test_a_packed_matmul_refuses_rows_and_shapes_that_it_does_not_cover(gpu):
    from onegrid.ops.packed_cuda import Packed, covers, packed_matmul

    weight = quantize(draw(32, 512), QUANTIZERS["mxfp8"])
    packed = Packed(weight.codes, weight.scales, weight.quantizer, (32, 512))
    a = operand(draw(80, 512), QUANTIZERS["mxfp8"])
    with pytest.raises(CapabilityError, match="80 rows"):
        packed_matmul(a, packed, None)
    assert not covers(QUANTIZERS["mxfp8"], (32, 256), gpu)
    assert not covers(QUANTIZERS["fp8_128x128"], (128, 128), gpu)


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4_all"])
def test_a_model_on_packed_weights_gives_the_bytes_of_decoded_ones(preset, gpu, monkeypatch):
    from onegrid.model import packed
    from onegrid.ops import matmul_choice
    from onegrid.study import bench

    monkeypatch.setattr(packed, "SMALLEST", 0)
    monkeypatch.setattr(matmul_choice, "BEYOND_CACHE", 1 << 20)
    monkeypatch.setattr(packed, "own_rows", lambda found: frozenset(c.rows for c in found if c.same_bytes) | {48})
    shape = bench.SHAPES["tiny"] | {"hidden_size": 512, "head_dim": 64, "intermediate_size": 1024}
    monkeypatch.setitem(bench.SHAPES, "wide", shape)
    rollouts = {}
    for weights in ("auto", "decoded"):
        engine = bench.engine("wide", preset, gpu, slots=64, max_len=48, weights=weights)
        assert (engine.weights.packed is not None) == (weights == "auto")
        if weights == "auto":
            keys = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
            assert engine.weights.packed.of(keys, 32) is not None
            engine.weights.verify()
        rollouts[weights] = engine.generate(bench.requests(37, prompt=5, new=12, vocab=512))
    for have, want in zip(rollouts["auto"], rollouts["decoded"], strict=True):
        assert_same_bytes(have.tokens_R, want.tokens_R)
        assert_same_bytes(have.logp_R, want.logp_R)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
def test_codes_of_weights_have_the_bytes_of_the_definition(name, gpu):
    from onegrid.ops.codes_cuda import amax_of, covers, quantized

    quantizer = QUANTIZERS[name]
    for shape in ((128, 128), (384, 4096), (4096, 12288), (3, 256, 640)):
        x = draw(*shape)
        x[..., 5, :], x[..., 7, 64:128] = 0, -0.0
        x[..., 9, :] *= 2.0**-130
        x[..., 11, :] *= 2.0**100
        if name == "nvfp4":
            x = x.clamp(-60, 60)
        assert covers(x, quantizer)
        for amax in (None, torch.rand(shape[:-2], device=gpu)) if name == "nvfp4" else (None,):
            have, want = quantized(x, quantizer, amax), quantize(x, quantizer, amax=amax)
            assert_same_bytes(have.codes, want.codes, f"codes {shape}")
            assert_same_bytes(have.scales, want.scales, f"scales {shape}")
            if want.amax is not None:
                assert_same_bytes(have.amax, want.amax)
                assert_same_bytes(have.factor, want.factor)
            for count in ("nonfinite", "saturated", "overflow"):
                assert int(getattr(have.stats, count)) == int(getattr(want.stats, count)), count
        assert_same_bytes(amax_of(x), x.abs().amax(dim=(-2, -1)).float())
        x[..., 2, 3], x[..., 3, 5] = torch.nan, torch.inf
        assert int(quantized(x, quantizer).stats.nonfinite) == 2 * max(1, shape[0] if len(shape) == 3 else 1)
    assert not covers(draw(130, 100), quantizer) and not covers(draw(128, 128).float(), quantizer)
    with pytest.raises(FormatError, match="amax"):
        quantized(draw(128, 128), quantizer, torch.ones(2, device=gpu))
