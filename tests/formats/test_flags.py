"""Counts of elements that moved, in whatever way they are added up."""

import pytest
import torch

from onegrid.formats import QUANTIZERS, count_true, quantize
from onegrid.model.canonical import count_moved


@pytest.mark.parametrize("num", [0, 1, 7, 1023, 1024, 1025, 3 * 1024 + 5, 300 * 1024])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_flags_are_counted_as_a_sum_counts_them(num, share, device):
    flags = torch.rand(num, generator=torch.Generator().manual_seed(num)) < share
    count = count_true(flags.to(device))
    assert count.dtype == torch.int64 and count.shape == () and int(count) == int(flags.sum())


def test_views_are_counted_wherever_they_begin_and_however_they_lie(device):
    flags = (torch.rand(3, 2051, generator=torch.Generator().manual_seed(1)) < 0.3).to(device)
    views = [flags[:, 1:], flags.view(-1)[5:], flags[1], flags[:, ::2], flags.T, flags[1, 7], flags[:0]]
    views += [flags.view(-1)[::2], flags[:, 3], flags[0].expand(4, -1), flags[0, 0].expand(3000)]
    for view in views:
        assert int(count_true(view)) == int(view.sum())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_code_that_differs_is_one_element(name, device):
    before = quantize(torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(device), QUANTIZERS[name])
    after = before.codes.clone()
    assert (int(count_moved(before, after)[0]), count_moved(before, after)[1]) == (0, 96 * 64)
    flat = after.view(torch.uint8).view(-1)
    flat[5] ^= 1  # one code, of one or of two in the byte
    flat[77] ^= 0x11  # both of two
    assert int(count_moved(before, after)[0]) == (2 if name == "mxfp8" else 3)
