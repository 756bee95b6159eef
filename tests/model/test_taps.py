"""What taps note of experts: rows of tokens, and zeros where nobody's rows are."""

from __future__ import annotations

import torch

from onegrid.model.taps import Tapped
from onegrid.ops.grouped import Dispatch, dispatch
from tests.bytes import assert_same_bytes


class Littered:
    """Linears that leave something else, every time, at places of no token, as matmuls of experts on a GPU may."""

    def __init__(self) -> None:
        self.calls = 0

    def linear(self, keys, x, dispatch=None, *, sent=False):
        self.calls += 1
        out = torch.full((len(dispatch.pair), 4), float(self.calls))
        owned = dispatch.pair < dispatch.place_NK.numel()
        out[owned] = x[dispatch.source[owned]]
        return [out for _ in keys]


def spacious(d: Dispatch, more: int) -> Dispatch:
    """The same with places behind the last expert, as on a GPU."""
    tokens, pairs = len(d.place_NK), d.place_NK.numel()
    source = torch.cat((d.source, torch.full((more,), tokens)))
    return Dispatch(d.place_NK, source, torch.cat((d.pair, torch.full((more,), pairs))), d.end_E)


def test_places_of_no_token_are_noted_as_zeros():
    experts = torch.tensor([[0, 2], [2, 1], [0, 1]])
    places = spacious(dispatch(experts, torch.ones(3, dtype=torch.bool), 3, tile=4), 8)
    x = torch.arange(12.0).view(3, 4) + 1
    littered = Littered()
    first, second = Tapped(littered), Tapped(littered)
    for tapped in (first, second):
        given = tapped.linear(("gate", "up"), x, places)
        assert_same_bytes(given[0][places.place_NK[1, 0]], x[1])
    assert [name for name, _ in first.taps] == ["gate", "up"]
    for (_, one), (_, other) in zip(first.taps, second.taps, strict=True):
        assert_same_bytes(one, other)
        assert int((one != 0).any(dim=1).sum()) == experts.numel()
