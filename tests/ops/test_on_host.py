"""The CUDA C++ kernels without a GPU: their bytes are those of the definitions, compiled for the CPU and run there."""

import pytest
import torch

from onegrid.errors import CapabilityError
from onegrid.formats import QUANTIZERS, quantize, quantize_decode
from onegrid.formats.casts import decode_elements
from onegrid.ops import few_cuda, packed_cuda
from onegrid.ops.arranged import arranged
from onegrid.ops.codes_cuda import THREADS as WRITERS
from onegrid.ops.codes_cuda import _tops, knows, launches_of
from onegrid.ops.cuda_source import TensorMap
from onegrid.ops.linear import matmul
from onegrid.ops.operand import Operand, operand, operand_of
from onegrid.ops.quantize_cuda import RULES, THREADS
from tests.bytes import assert_same_bytes
from tests.ops.on_host import run_on_host


def whole_numbers(*shape, seed):
    """BF16 whole numbers of up to three bits: sums of some thousand products of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 7, shape, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "num_columns", "columns", "pairs", "chunks", "stages"),
    [
        ("mxfp8", 104, 48, 2, 2, 3),
        ("mxfp8", 136, 128, 1, 1, 3),
        ("mxfp8", 72, 32, 3, 2, 2),
        ("mxfp4", 40, 24, 4, 2, 2),
        ("nvfp4_row", 96, 64, 2, 1, 3),
        ("nvfp4_row", 200, 176, 1, 2, 2),
        ("mxfp4", 144, 144, 1, 2, 4),  # a ring longer than K, 16 columns in the last warpgroup
    ],
)
def test_a_packed_matmul_is_that_of_decoded_weights(tmp_path, weight, num_columns, columns, pairs, chunks, stages):
    k, rows, halves = 1536, 16 * pairs, 1 if columns <= 32 else 2
    forms = -(-columns // (32 * halves))
    quantizer = QUANTIZERS[weight]
    w = whole_numbers(num_columns, k, seed=1)
    w[:, ::3] *= 8
    w[5], w[:, 32:64] = 0, 0
    q = quantize(w, quantizer)
    a = operand(whole_numbers(rows, k, seed=2), quantizer)
    whole = operand_of(q)
    x = a.values.to(torch.bfloat16)
    macros = dict(
        COLUMNS=columns, FORMS=forms, HALVES=halves, MT=pairs, CHUNKS=chunks, STAGES=stages, BITS=quantizer.fmt.bits,
        E8M0=int(quantizer.scale == "e8m0"), EARLY=1,
    )  # fmt: skip
    out = torch.full((rows, num_columns), float("nan"), dtype=torch.bfloat16)
    factors = [x, x] if a.row is None else [a.row.contiguous(), whole.row.contiguous()]
    run_on_host(
        tmp_path, "packed.cu", "packed_matmul", -(-num_columns // columns), packed_cuda.threads_of(forms),
        [arranged(x), *packed_cuda.maps_of(q.codes, q.scales, columns), *factors, out, num_columns, k], **macros,
    )  # fmt: skip
    assert_same_bytes(out, matmul(a, whole))


def test_a_packed_matmul_refuses_rows_that_do_not_go_with_its_weights():
    q = quantize(whole_numbers(16, 512, seed=1), QUANTIZERS["nvfp4"])
    packed = packed_cuda.Packed(q.codes, q.scales, q.quantizer, (16, 512))
    x = whole_numbers(16, 512, seed=2)
    rows, columns = operand(x, QUANTIZERS["nvfp4_row"]), operand_of(q).row
    for a, row, what in (
        (operand(x, QUANTIZERS["mxfp8"]), columns, "decoded rows with nvfp4 weights"),
        (rows, None, "without the factors"),
        (Operand(rows.values, "nvfp4"), columns, "without the factors"),
    ):
        with pytest.raises(CapabilityError, match=what):
            packed_cuda.packed_matmul(a, packed, row)


@pytest.mark.parametrize("num_columns", [16, 1024, 4096, 6144, 24_576, 57_344])
@pytest.mark.parametrize("weight", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [16, 32, 48, 64])
def test_packed_weights_too_lie_evenly_on_multiprocessors_and_fit_their_memory(num_columns, weight, rows):
    macros, blocks, shared_bytes = packed_cuda.tiling_of((num_columns, 4096), QUANTIZERS[weight], rows, 132)
    columns, width = macros["COLUMNS"], 32 * macros["HALVES"]
    assert columns % (8 * macros["HALVES"]) == 0 and 0 <= width * macros["FORMS"] - columns < width
    assert (blocks - 1) * columns < num_columns <= blocks * columns and macros["STAGES"] >= 3
    chunk = 128 * columns + rows * 2 * (256 if macros["BITS"] == 4 else 128)
    ring = macros["STAGES"] * macros["CHUNKS"] * chunk
    assert 1024 + ring - chunk + 128 * width * macros["FORMS"] <= shared_bytes <= 226 * 1024
    assert 1024 + ring + 2 * 16 * columns + 16 * width * macros["FORMS"] <= shared_bytes


@pytest.mark.parametrize(
    ("columns", "num_columns", "pairs", "slabs", "stages", "stages_of_k"),
    [(32, 72, 2, 2, 3, 5), (48, 48, 1, 1, 2, 3), (136, 264, 3, 1, 3, 4), (64, 128, 4, 2, 2, 2), (72, 72, 2, 2, 8, 1)],
)
def test_a_matmul_of_few_rows_is_that_of_the_definition(
    tmp_path, columns, num_columns, pairs, slabs, stages, stages_of_k
):
    k, rows, forms = 64 * slabs * stages_of_k, 16 * pairs, -(-columns // 64)
    x, w = whole_numbers(rows, k, seed=1), whole_numbers(num_columns, k, seed=2)
    out = torch.full((rows, num_columns), float("nan"), dtype=torch.bfloat16)
    run_on_host(
        tmp_path, "few.cu", "few_matmul", -(-num_columns // columns), few_cuda.threads_of(forms),
        [TensorMap(w, columns), TensorMap(x, rows), out, num_columns, k],
        COLUMNS=columns, FORMS=forms, MT=pairs, SLABS=slabs, STAGES=stages, EARLY=1,
    )  # fmt: skip
    assert_same_bytes(out, matmul(operand(x, None), operand(w, None)).to(torch.bfloat16))


@pytest.mark.parametrize("num_columns", [8, 1024, 4096, 6144, 24_576, 57_344, 151_936])
@pytest.mark.parametrize("rows", [16, 32, 48, 64])
def test_every_multiprocessor_has_an_even_share_of_columns_and_room_for_it(num_columns, rows):
    macros, blocks, shared_bytes = few_cuda.tiling_of((num_columns, 4096), rows, 132)
    columns, forms = macros["COLUMNS"], macros["FORMS"]
    assert columns % 8 == 0 and 64 * (forms - 1) < columns <= 64 * forms and macros["MT"] == rows // 16
    assert (blocks - 1) * columns < num_columns <= blocks * columns
    assert columns == 8 or blocks > -(-blocks // 132) * 132 * 0.75  # no wave is much emptier than the others
    slab = 128 * (columns + rows)
    last = (macros["STAGES"] * macros["SLABS"] - 1) * slab  # of the last slab of rows read by a whole warpgroup
    assert macros["STAGES"] >= 3 and last + 64 * forms * 128 + 1024 <= shared_bytes <= 226 * 1024


def test_rows_are_arranged_as_the_page_says():
    x, order = torch.arange(16 * 48).view(16, 48), arranged(torch.arange(16 * 48).view(16, 48)).view(3, 2, 16, 8)
    for m, k in ((0, 0), (0, 1), (3, 18), (15, 47)):
        assert order[k // 16, k % 2, m, k % 16 // 2] == x[m, k]


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
    out, ordered, amax = torch.empty_like(x), torch.empty_like(x), torch.empty(rows)
    macros = dict(WIDTH=quantizer.block[1], FOUR=int(quantizer.fmt.bits == 4), POWERS=RULES[quantizer.rule])
    macros |= dict(CHUNKS=1, EARLY=1, ARRANGED=1)
    if quantizer.rule == "nvfp4":
        args = [x, out, ordered, amax, width // 8, width // 8]
        run_on_host(tmp_path, "quantize.cu", "rows", rows, THREADS, args, **macros)
    else:
        pieces = rows * width // 8
        grid = -(-pieces // THREADS)
        run_on_host(tmp_path, "quantize.cu", "flat", grid, THREADS, [x, out, ordered, pieces, width // 8], **macros)
    assert_same_bytes(ordered, arranged(out))
    want = quantize_decode(x, quantizer)
    values = want.values.to(torch.bfloat16)
    values.view(torch.int16)[values.isnan()] = 0x7FFF  # the NaN that a GPU gives
    assert_same_bytes(out, values)
    if quantizer.rule == "nvfp4":
        assert_same_bytes(amax, want.amax.flatten())


def weights_of_all_sizes(*shape):
    """BF16 rows from the smallest numbers to the largest, with blocks and rows of zeros, ties, and both zeros."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-135, 128, (*shape[:-1], 1), generator=generator)
    x[..., 1, :], x[..., 2, 32:64] = 0, -0.0
    x[..., 3, :] = torch.randint(-20, 21, shape[-1:], generator=generator) / 4  # many ties
    x[..., 4, :] = torch.randint(-464, 465, shape[-1:], generator=generator)
    return x.clamp(-3.3e38, 3.3e38).to(torch.bfloat16)


def codes_on_host(folder, x, quantizer, amax=None):
    made, launches = launches_of(x, quantizer, amax)
    made.codes.fill_(0xEE)
    for launch in launches:
        run_on_host(folder, "codes.cu", launch.function, launch.blocks, WRITERS, launch.args, **launch.macros)
    return made


@pytest.mark.parametrize(
    ("name", "shape"),
    [("mxfp8", (2, 60, 96)), ("mxfp4", (137, 64)), ("nvfp4", (3, 210, 80)), ("fp8_128x128", (2, 256, 128))],
)
def test_codes_scales_and_counts_are_those_of_the_definition(tmp_path, name, shape):
    quantizer = QUANTIZERS[name]
    assert knows(quantizer, shape)
    inputs = [weights_of_all_sizes(*shape)]
    if name == "nvfp4":
        inputs[0][0] = weights_of_all_sizes(*shape)[0].clamp(-4.0, 4.0)
        inputs[0][2] = 0
    for x in inputs:
        amax = torch.rand(shape[:-2]) if name == "nvfp4" else None
        for given in {id(a): a for a in (None, amax)}.values():
            have, want = codes_on_host(tmp_path, x, quantizer, given), quantize(x, quantizer, amax=given)
            for part in ("scales", "codes", "amax", "factor"):
                if getattr(want, part) is not None:
                    assert_same_bytes(getattr(have, part), getattr(want, part), part)
            for count in ("nonfinite", "saturated", "overflow"):
                assert int(getattr(have.stats, count)) == int(getattr(want.stats, count)), count


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
def test_what_is_not_finite_is_counted(tmp_path, name):
    x = weights_of_all_sizes(128, 128)
    x[7, 3], x[9, 40], x[9, 41], x[39, 63] = torch.inf, torch.nan, -torch.inf, -torch.nan
    assert int(codes_on_host(tmp_path, x, QUANTIZERS[name]).stats.nonfinite) == 4


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_ties_and_their_neighbours_get_the_codes_of_the_definition(tmp_path, name):
    """In each block the largest number of the format, and points halfway between neighbours with what lies beside."""
    quantizer = QUANTIZERS[name]
    values = decode_elements(quantizer.fmt.finite_codes(), quantizer.fmt).sort().values
    ties = ((values[1:] + values[:-1]) / 2).to(torch.bfloat16).view(torch.int16)
    near = (ties[ties.abs() > 2].unsqueeze(-1) + torch.arange(-2, 3, dtype=torch.int16)).view(torch.bfloat16).flatten()
    width = quantizer.block[1] - 1
    near = near.repeat(width).view(-1, width)[:42]  # the numbers over and over; the first 42 rows have all
    x = torch.cat([torch.full((len(near), 1), quantizer.fmt.max), near], 1).to(torch.bfloat16)
    x = torch.cat([x, x * 2.0**-100, x * 2.0**90, x * 1.25])
    for given in (None, torch.tensor(0.3 * 448)) if name == "nvfp4" else (None,):
        assert_same_bytes(codes_on_host(tmp_path, x, quantizer, given).codes, quantize(x, quantizer, amax=given).codes)


def test_the_amax_of_tensors_comes_in_parts(tmp_path):
    x = weights_of_all_sizes(3, 1030, 32)
    parts, launch = _tops(x)
    assert parts.shape == (3, 3)
    run_on_host(tmp_path, "codes.cu", launch.function, launch.blocks, WRITERS, launch.args, **launch.macros)
    assert_same_bytes(parts.amax(-1), x.abs().amax(dim=(-2, -1)).float())


def test_what_the_kernel_of_codes_does_not_know_is_left_to_the_definition():
    assert not knows(QUANTIZERS["mxfp8"], (4, 48)) and not knows(QUANTIZERS["fp8_128x128"], (64, 128))
    assert not knows(QUANTIZERS["nvfp4_row"], (4, 64)) and not knows(QUANTIZERS["fp8_128x128_fp32"], (128, 128))
    assert not knows(QUANTIZERS["mxfp8_floor"], (4, 64)) and not knows(QUANTIZERS["mxfp8"], (0, 64))
