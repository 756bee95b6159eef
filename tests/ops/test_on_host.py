"""The CUDA C++ kernels without a GPU: their bytes are those of the definitions, compiled for the CPU and run there."""

import pytest
import torch

from onegrid.formats import QUANTIZERS, quantize, quantize_decode
from onegrid.ops.linear import matmul
from onegrid.ops.operand import operand, operand_of
from onegrid.ops.quantize_cuda import RULES, THREADS
from tests.bytes import assert_same_bytes
from tests.ops.on_host import run_on_host


def whole_numbers(*shape, seed):
    """BF16 whole numbers of up to three bits: sums of some thousand products of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 7, shape, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "tiles", "per_warp", "row_warps", "pairs", "depth"),
    [
        ("mxfp8", 4, 1, 1, 2, 256),
        ("mxfp8", 4, 2, 2, 2, 512),
        ("mxfp8", 6, 3, 1, 1, 128),
        ("mxfp4", 4, 1, 2, 4, 256),
        ("nvfp4_row", 6, 2, 1, 2, 256),
        ("nvfp4_row", 4, 4, 1, 3, 256),
    ],
)
def test_a_packed_matmul_is_that_of_decoded_weights(tmp_path, weight, tiles, per_warp, row_warps, pairs, depth):
    columns, k, rows, stages = 40, 3 * depth, 16 * pairs, 2
    quantizer = QUANTIZERS[weight]
    w = whole_numbers(columns, k, seed=1)
    w[:, ::3] *= 8
    w[5], w[:, 32:64] = 0, 0
    q = quantize(w, quantizer)
    a = operand(whole_numbers(rows, k, seed=2), quantizer)
    whole = operand_of(q)
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
    x = a.values.to(torch.bfloat16)
    factors = [x, x] if a.row is None else [a.row.contiguous(), whole.row.contiguous()]
    run_on_host(
        tmp_path, "packed.cu", "packed_matmul", -(-columns // (8 * tiles)), 32 * (tiles // per_warp * row_warps + 5),
        [x, q.codes, q.scales, *factors, out, columns, k],
        NT=tiles, TPW=per_warp, WR=row_warps, MT=pairs, KS=depth, STAGES=stages, BITS=quantizer.fmt.bits,
        E8M0=int(quantizer.scale == "e8m0"), EARLY=1,
    )  # fmt: skip
    assert_same_bytes(out, matmul(a, whole))


def hard_numbers(rows, width):
    """All orders of magnitude, blocks of zeros, NaN, infinities and the smallest numbers."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=generator) * 2.0 ** torch.randint(-130, 120, (rows, 1), generator=generator)
    x = x.to(torch.bfloat16)
    x[0], x[1, :64] = 0, 0
    x[2, 3], x[2, 200], x[3, 5], x[4, 7] = float("nan"), -float("nan"), float("inf"), -float("inf")
    x[5] = torch.tensor(1, dtype=torch.int16).view(torch.bfloat16)
    return x


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "fp8_1x128", "nvfp4_row"])
def test_quantize_and_decode_has_the_bytes_of_the_definition(tmp_path, name):
    quantizer, rows, width = QUANTIZERS[name], 9, 512
    x = hard_numbers(rows, width)
    out, amax = torch.empty_like(x), torch.empty(rows)
    macros = dict(WIDTH=quantizer.block[1], FOUR=int(quantizer.fmt.bits == 4), POWERS=RULES[quantizer.rule])
    if quantizer.rule == "nvfp4":
        args = [x, out, amax, width // 8, width // 8]
        run_on_host(tmp_path, "quantize.cu", "rows", rows, THREADS, args, CHUNKS=1, EARLY=1, **macros)
    else:
        pieces = rows * width // 8
        grid = -(-pieces // THREADS)
        run_on_host(tmp_path, "quantize.cu", "flat", grid, THREADS, [x, out, pieces], CHUNKS=1, EARLY=1, **macros)
    want = quantize_decode(x, quantizer)
    values = want.values.to(torch.bfloat16)
    values.view(torch.int16)[values.isnan()] = 0x7FFF  # the NaN that a GPU gives
    assert_same_bytes(out, values)
    if quantizer.rule == "nvfp4":
        assert_same_bytes(amax, want.amax.flatten())
