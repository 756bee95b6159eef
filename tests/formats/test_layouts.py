"""Tiles of scales, digests and the transform: what moves bytes must lose none."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from onegrid.errors import FormatError
from onegrid.formats import QUANTIZERS, digest, digest_rows, hadamard, quantize, swizzle_128x4, unswizzle_128x4
from onegrid.formats.hadamard import SIGNS, rotation
from tests.bytes import assert_same_bytes
from tests.formats import inputs

MASK = (1 << 64) - 1


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (200, 7), (32, 4), (0, 4), (300, 1)])
def test_swizzled_scales_lie_where_the_formula_says(shape, device):
    rows, blocks = shape
    scales_MB = torch.randint(1, 255, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8).to(device)
    flat = swizzle_128x4(scales_MB)
    assert flat.numel() == -(-rows // 128) * -(-blocks // 4) * 512
    for i in range(0, rows, 13):
        for j in range(blocks):
            offset = ((i // 128) * -(-blocks // 4) + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            assert flat[offset] == scales_MB[i, j]
    assert int(flat.long().sum()) == int(scales_MB.long().sum()), "padding is 0"
    assert_same_bytes(unswizzle_128x4(flat, shape), scales_MB)
    stacked = torch.stack((scales_MB, scales_MB))
    assert_same_bytes(swizzle_128x4(stacked)[1], flat)
    assert_same_bytes(unswizzle_128x4(swizzle_128x4(stacked), shape), stacked)


def test_a_wrong_number_of_scale_bytes_is_refused():
    with pytest.raises(FormatError, match="takes 1024 bytes, not 512"):
        unswizzle_128x4(torch.zeros(512, dtype=torch.uint8), (129, 4))


def test_pieces_of_any_size_in_any_order_sum_to_the_digest(device):
    x = inputs.ordinary(300, 129).bfloat16().to(device)
    whole, data = digest(x), x.contiguous().view(torch.uint8).flatten()
    draw = random.Random(0)
    for longest in (1000, 40_000, 10**6):
        cuts = [0]
        while cuts[-1] < data.numel():
            cuts.append(min(data.numel(), cuts[-1] + draw.randint(1, longest)))
        pieces = [(start, data[start:end]) for start, end in itertools.pairwise(cuts)]
        draw.shuffle(pieces)
        assert sum(digest(piece, start=start) for start, piece in pieces) & MASK == whole
    single = sum(digest(data[i : i + 1], start=i) for i in range(40)) + digest(data[40:], start=40)
    assert single & MASK == whole
    assert sum(digest_rows(x)) & MASK == whole
    assert digest(x.t().contiguous().t()) == whole, "strides do not matter"
    assert 0 <= whole <= MASK


def test_any_changed_moved_or_missing_byte_changes_the_digest():
    data = torch.arange(40_000).remainder(251).to(torch.uint8)
    whole = digest(data)
    for at in (0, 1, 16_383, 16_384, 39_999):
        for change in (1, 127, 128, 255):
            other = data.clone()
            other[at] += change
            assert digest(other) != whole
    assert digest(data.roll(1)) != whole
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert digest(zeros) != digest(zeros[:63])
    assert digest(data, role="scales") != whole
    with pytest.raises(FormatError, match="allowed are values, codes, scales, amax"):
        digest(data, role="weights")


def test_the_digest_of_a_quantized_tensor_sees_every_part():
    q = quantize(inputs.ordinary(32, 64), QUANTIZERS["nvfp4"])
    parts = {"codes": q.codes, "scales": q.scales, "amax": q.amax}
    assert digest(q) == sum(digest(part, role=role) for role, part in parts.items()) & MASK
    seen = {digest(q)}
    for part in parts.values():
        flat = part.reshape(-1).view(torch.uint8)
        flat[0] ^= 1
        seen.add(digest(q))
        flat[0] ^= 1
    assert len(seen) == 4


def test_differing_rows_are_found():
    one = inputs.ordinary(16, 33)
    other = one.clone()
    other[5, 7] += 1
    assert [i for i, (a, b) in enumerate(zip(digest_rows(one), digest_rows(other), strict=True)) if a != b] == [5]


def test_the_digest_is_a_fixed_function_of_the_bytes(device):
    data = torch.arange(1000, device=device).to(torch.uint8)
    assert digest(data) == 0x0 + digest(data.cpu())
    assert digest(data[:0]) == 0


def test_the_transform_is_orthogonal_and_rounds_to_bf16(device):
    assert_same_bytes(rotation(device) @ rotation(device).T, torch.eye(16, device=device))
    x_MK = inputs.ordinary(64, 20).to(device)
    turned = hadamard(x_MK)
    assert turned.dtype == torch.bfloat16
    signs = torch.tensor(SIGNS, dtype=torch.float64)
    sylvester = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)], dtype=torch.float64)
    exact = (
        x_MK.cpu().bfloat16().double().view(4, 16, 20).transpose(1, 2) @ (signs[:, None] * sylvester / 4)
    ).transpose(1, 2)
    assert_same_bytes(turned, exact.float().bfloat16().reshape(64, 20))
    assert_same_bytes(hadamard(x_MK.t(), axis=-1), turned.t())
    with pytest.raises(FormatError, match="17 elements along axis -2"):
        hadamard(torch.ones(17, 2))


def test_a_transformed_product_is_the_same_product():
    a, b = inputs.ordinary(64, 8).bfloat16(), inputs.ordinary(64, 8, seed=1).bfloat16()
    exact, turned = a.double().T @ b.double(), hadamard(a).double().T @ hadamard(b).double()
    # Each transformed element is rounded once, by at most 2^-9 of its size: the sums differ by 2^-8 |a| |b| at most.
    assert ((exact - turned).abs() <= 2**-8 * a.double().norm(dim=0)[:, None] * b.double().norm(dim=0) * 1.01).all()
