"""A difference is named down to the row and block, with both bytes and both values."""

from __future__ import annotations

import pytest
import torch

from onegrid.formats import QUANTIZERS, quantize
from onegrid.guard.causes import cause_of
from onegrid.guard.locate import first_difference
from onegrid.model.canonical import parts_of, raw_bytes


def changed(parts, part, index, value=None):
    """The same parts with one byte changed."""
    out = {name: x.clone() for name, x in parts.items()}
    raw = raw_bytes(out[part])
    raw[index] = (int(raw[index]) ^ 1) if value is None else value
    return out


@pytest.mark.parametrize(
    ("quantizer", "shape", "part", "index", "expected"),
    [
        ("mxfp8", (4, 96), "codes", 2 * 96 + 70, (2, 2, 70)),
        ("mxfp8", (4, 96), "scales", 1 * 3 + 2, (1, 2, 64)),
        ("nvfp4", (4, 64), "codes", 3 * 32 + 20, (3, 2, 40)),
        ("nvfp4", (4, 64), "amax", 1, (0, None, 0)),
        ("fp8_128x128", (200, 300), "scales", 4 * 4, (1, 1, 128)),
    ],
)
def test_the_first_byte_that_differs_is_named_down_to_its_block(quantizer, shape, part, index, expected, device):
    q = quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device), QUANTIZERS[quantizer])
    parts = parts_of(q)
    assert first_difference(q, parts, parts) is None
    found = first_difference(q, parts, changed(parts, part, index))
    assert (found.part, (found.row, found.block, found.column), found.num_bytes) == (part, expected, 1)
    assert found.byte_expected ^ found.byte_found == 1
    assert found.value_expected != found.value_found or part == "amax"
    assert f"row {found.row}" in str(found) and f"0x{found.byte_found:02x}" in str(found)


def test_plain_tensors_have_rows_and_no_blocks():
    x = torch.arange(12).view(3, 4).to(torch.bfloat16)
    found = first_difference(x, {"values": x}, changed({"values": x}, "values", 2 * 8 + 5))
    assert (found.row, found.block, found.column, found.value_expected) == (2, None, 2, 10.0)


def test_a_part_that_is_not_there_in_this_shape_is_said_so():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert "not there" in str(first_difference(x, {"values": x}, {}))
    assert "not there" in str(first_difference(x, {"values": x}, {"values": x.float()}))


def test_the_likely_cause_follows_from_the_bytes():
    generator = torch.Generator().manual_seed(0)
    old, new, other = (quantize(torch.randn(4, 64, generator=generator) * s, QUANTIZERS["mxfp8"]) for s in (1, 9, 1))
    expected = {"gate": parts_of(new), "up": parts_of(other)}
    previous = {"gate codes": 1, "gate scales": 2}

    def cause(found, codes=10, scales=20):
        return cause_of("gate", expected, found, previous, {"codes": codes, "scales": scales})

    assert "version before: its update was skipped" in cause(parts_of(old), 1, 2)
    assert "under the scales of the version before" in cause(parts_of(new) | {"scales": old.scales}, 10, 2)
    assert "content of up" in cause(parts_of(other))
    assert "one byte of its codes" in cause(changed(parts_of(new), "codes", 3))
    assert "never written" in cause(parts_of(new) | {"scales": torch.zeros_like(new.scales)})
    assert "another order" in cause({part: x.roll(1, 0) for part, x in parts_of(new).items()})
    assert "another scale rule" in cause(parts_of(new) | {"scales": new.scales + 1})
